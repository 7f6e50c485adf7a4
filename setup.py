"""The C extensions; pyproject.toml has all else.

A build goes on without them where they can't be compiled. With STREAMLOAD_REQUIRE_KERNEL=1 it fails instead.
"""

import os

from setuptools import Extension, setup


def extension(name: str, *headers: str) -> Extension:
    """One of the modules in streamload/transforms."""
    folder = "streamload/transforms"
    return Extension(
        f"streamload.transforms.{name}",
        [f"{folder}/{name}.c"],
        depends=[f"{folder}/{header}" for header in headers],
        extra_compile_args=["-O3", "-ffp-contract=off"],
        py_limited_api=True,
        optional=os.environ.get("STREAMLOAD_REQUIRE_KERNEL") != "1",
    )


setup(
    ext_modules=[extension("_before"), extension("_avx2", "_neon.h")],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)

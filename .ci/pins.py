"""Print what is installed beside streamload as constraints: `make pins` runs this in a fresh environment.

A pin that the oldest supported Python can't have is marked with the Python that it needs: an older one then
resolves that package by itself.
"""

import re
from importlib.metadata import distributions

OLDEST = (3, 10)
HEAD = """\
# Every direct and indirect dependency, as resolved together: `make pins` writes this file.
# torch has no build named here, so that the index decides between CPU and CUDA.
"""


def pin(name: str, version: str, requires_python: str | None) -> str:
    """`name==version`, without its local build tag, marked if it needs a newer Python than OLDEST."""
    line = f"{name}=={version.partition('+')[0]}"
    needed = re.search(r">=?\s*3\.(\d+)", requires_python or "")
    if needed and (3, int(needed[1])) > OLDEST:
        line += f' ; python_version >= "3.{needed[1]}"'
    return line


if __name__ == "__main__":
    ours = {"streamload", "pip"}
    found = {d.name: pin(d.name, d.version, d.metadata["Requires-Python"]) for d in distributions()}
    print(HEAD + "\n".join(found[name] for name in sorted(found, key=str.lower) if name.lower() not in ours))

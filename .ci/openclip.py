"""Check that open_clip's training can be imported; the Makefile runs this with .venv-openclip.

A torchvision built for CUDA can't be imported beside a torch for CPUs: it lacks the schemas of two operators.
Where the package index has no torchvision for CPUs, they are written into the one that was installed.
"""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

SCHEMAS = Path(__file__).parents[1] / "benchmarks" / "torchvision_stub.py"
CALL = "\nfrom ._schemas import define_torchvision_schemas\n\ndefine_torchvision_schemas()\n"


def error_of_import() -> str:
    """The last line of what importing it writes; "": it can be imported."""
    command = [sys.executable, "-c", "import open_clip_train.main"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stderr.strip() or "unknown").splitlines()[-1] if done.returncode else ""


def add_schemas() -> None:
    """Make torchvision define its two operators before it registers anything for them."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    package = Path(spec.origin).parent
    shutil.copy(SCHEMAS, package / "_schemas.py")
    with (package / "extension.py").open("a", encoding="utf-8") as extension:
        extension.write(CALL)


if __name__ == "__main__":
    error = error_of_import()
    if "torchvision::" in error:
        add_schemas()
        error = error_of_import()
    if error:
        sys.exit(
            f"open_clip_train can't be imported: {error}\n"
            f"torch and torchvision have to be of one build and of releases that fit: for CPUs both from "
            f"PyTorch's index of CPU builds (PIP_EXTRA_INDEX_URL), then run make again"
        )

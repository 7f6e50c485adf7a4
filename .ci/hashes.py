"""Write the image's requirements with the hashes of their files: `make pins` runs this with uv beside it.

    hashes.py CONSTRAINTS FOLDER

`requirements.txt` has what the image needs, in the versions of the constraints; `requirements-torch.txt` has
torch and what only its builds for GPUs need, so that another build of torch can take their place.
"""

import re
import subprocess
import sys
from pathlib import Path

PYTHON = "3.13"
"""Of the image."""
TORCH = re.compile(r"(torch|triton|nvidia-|cuda-)")
HEAD = "# Under the pins of constraints.txt, with the hashes of all files: `make pins` writes this file.\n"


def compiled(constraints: Path) -> list[str]:
    """Each requirement with its hashes, as pip reads it."""
    command = [
        *(
            Path(sys.executable).with_name("uv"),
            "pip",
            "compile",
            "pyproject.toml",
            "--extra",
            "demo",
            "--extra",
            "s3",
        ),
        *("--constraint", constraints, "--python-version", PYTHON, "--python-platform", "linux"),
        *("--generate-hashes", "--no-header", "--no-annotate", "--quiet"),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return re.split(r"\n(?=\S)", done.stdout.strip())


if __name__ == "__main__":
    found, folder = compiled(Path(sys.argv[1])), Path(sys.argv[2])
    of_torch = [requirement for requirement in found if TORCH.match(requirement)]
    others = [requirement for requirement in found if requirement not in of_torch]
    for name, requirements in (("requirements.txt", others), ("requirements-torch.txt", of_torch)):
        (folder / name).write_text(HEAD + "\n".join(requirements) + "\n")

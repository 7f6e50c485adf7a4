"""Check the share of names in streamload that say nothing of their values, such as `found` or `one`.

Usage: python .ci/names.py [FOLDER]; with a folder, lists where it has such names.
"""

import ast
import sys
from pathlib import Path

MOST_PERCENT = 0.5  # may only fall
FILLERS = """one own found known given some what who told wanted others rest now seen taken begun made began
    asked said each of by at"""


def main() -> str | None:
    """Print the share; returns what is wrong."""
    names = []
    for path in Path(*sys.argv[1:] or ["streamload"]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.append((node.id, f"{path}:{node.lineno}"))
            elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
                names.append((node.arg, f"{path}:{node.lineno}"))
    fillers = [f"{place} {name}" for name, place in names if name in FILLERS.split()]
    percent = 100 * len(fillers) / len(names)
    print(*fillers if sys.argv[1:] else (), f"{percent:.2f} % of {len(names)} names say nothing", sep="\n")
    is_exact = sys.argv[1:] or MOST_PERCENT - 0.2 <= percent <= MOST_PERCENT
    return None if is_exact else f"expected {MOST_PERCENT} % or up to 0.2 less: rename, or lower MOST_PERCENT"


sys.exit(main())

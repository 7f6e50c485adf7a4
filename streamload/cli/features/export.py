"""`streamload features export`: rows of a fingerprint as plain numpy files. Read-only."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from streamload.cli.features.options import Directory, Fingerprint, rows_at
from streamload.cli.options import AsJson
from streamload.cli.terminal import print_json, say


def export(
    fingerprint: Fingerprint,
    out: Annotated[Path, typer.Argument(help="A folder, which is made.")],
    keys: Annotated[
        Path | None,
        typer.Option(help="A file with the keys, one a line: texts, or in a .jsonl JSON (3, or an array)."),
    ] = None,
    directory: Directory = None,
    as_json: AsJson = False,
) -> None:
    """Write the rows of a fingerprint as .npy files, which numpy reads without streamload.

    Each layout of results has a folder, layout-0 and so on: leaf-0.npy and so on, [rows, ...], for each of
    their tensors and arrays; names.npy with the names of the rows in the same order; and layout.json, which
    says what each leaf is. A dtype that numpy lacks is stored as unsigned integers: bfloat16 as uint16. A
    name is 64 hexadecimal digits, the fingerprint and a digest of the key: keys aren't stored. With --keys
    the keys that you have are written beside the names, to keys.txt, unless the calls had other arguments
    than the input. Damaged rows are left out; then the exit code is 1.
    """
    from streamload.derived.store.catalog import export as write

    with rows_at(directory) as catalog:
        chosen = catalog.find(fingerprint)
        exported = write(catalog, chosen, out, None if keys is None else _lines_by_name(keys, chosen))
    if as_json:
        about = {"fingerprint": chosen.hex(), "out": str(out), "layouts": exported.layouts}
        print_json({**about, "named": exported.named, "damaged": exported.damaged})
    else:
        layouts = f"{len(exported.layouts):,} layout{'s' if len(exported.layouts) > 1 else ''}"
        say(f"{sum(exported.layouts):,} rows of {layouts}: {out}")
        if keys is not None:
            say(f"{exported.named:,} of them have keys of {keys}")
        if exported.damaged:
            say(f"left out: {exported.damaged:,} damaged rows (streamload cache verify --repair)")
    if exported.damaged:
        raise typer.Exit(1)


def _lines_by_name(file: Path, fingerprint: bytes) -> dict[bytes, str]:
    """The lines of a file of keys by the names of their rows, of one key a row and of one key a result."""
    from streamload.derived.store.keys import Naming
    from streamload.errors import OptionError

    namings = [Naming(fingerprint, b"", is_row=is_row) for is_row in (True, False)]
    lines_by_name: dict[bytes, str] = {}
    with file.open(encoding="utf-8") as lines:
        for number, whole in enumerate(lines, start=1):
            line = whole.rstrip("\r\n")
            try:
                key = _tuples(json.loads(line)) if file.suffix == ".jsonl" else line
                lines_by_name.update((naming.name(key), line) for naming in namings)
            except (ValueError, RecursionError) as exc:
                raise OptionError(f"{file}, line {number}: {exc}") from exc
    return lines_by_name


def _tuples(key: Any) -> Any:
    return tuple(map(_tuples, key)) if isinstance(key, list) else key

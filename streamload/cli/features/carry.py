"""`streamload features carry`: rows of shards for others with the same samples."""

from typing import Annotated

import typer

from streamload.cli.features.options import Directory, rows_at
from streamload.cli.logs import progress
from streamload.cli.options import AsJson, StorageOptions, storage_options_of
from streamload.cli.terminal import print_json, say


def carry(
    old: Annotated[str, typer.Argument(help="The shards that have rows: braces, '::', as for make_loader.")],
    new: Annotated[str, typer.Argument(help="The shards with the same samples, packed in another way.")],
    directory: Directory = None,
    storage_options: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Copy the rows of samples to shards that were re-packed, without computing any.

    Samples are the same if the bytes of their members are. Both lists of shards are read once. Rows of texts
    and of variants are computed again.
    """
    from streamload.derived.store.row_store import RowPlace, RowStore
    from streamload.features.carry import carry as copy
    from streamload.urls import expand_urls

    storage = storage_options_of(storage_options)
    with rows_at(directory) as catalog:
        labels = {rows.fingerprint: rows.label for rows in catalog.fingerprints()}
    lists = expand_urls(old), expand_urls(new)
    store = RowStore(RowPlace(directory or ""))
    try:
        with progress("shards") as show:
            show(total=sum(map(len, lists)))
            carried = copy(*lists, store, labels, storage, lambda: show(advance=1))
    finally:
        store.close()
    if as_json:
        print_json({"samples": carried.samples, "shared": carried.shared, "rows": carried.rows})
    else:
        say(
            f"{carried.shared:,} of {carried.samples:,} samples are in the old shards: {carried.rows:,} rows "
            f"of {len(labels):,} fingerprints lie with the new ones now"
        )

"""Whether shards under a path are copied into the cache, as remote ones are, or read in place (step A).

`Cache(copy=…)` is decided here, once for all processes of a node: first the folders that may be copied, then,
with the tier that is there, whether they are. A `ShardList` carries the result (`copied`), and a `Shard`
that is copied has no `local` file for all that follows.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from streamload import limits
from streamload.cache.placement import SharedDecision, origin_size
from streamload.cache.shard import ShardList, fingerprint, spread
from streamload.cache.tier import Choice, Placed, memory_root
from streamload.metrics import format_bytes
from streamload.options import Copy, Settings, file_system
from streamload.urls import UrlList, folder_of, is_local, local_path

logger = logging.getLogger("streamload")

_EVERYWHERE = "/"
_LEAST_SHARE = 5
"""A cache that can keep less than a fifth of the data would move the same bytes, and write them besides."""
_SHARDS_ASKED = 4


def folders_to_copy(listed: UrlList, copy: Copy) -> tuple[str, ...]:
    """The folders whose shards are copied, if the tier allows it: with "auto" those on network file systems.

    Touches none of these file systems.
    """
    if copy == "never" or not any(map(is_local, listed.kinds())):
        return ()
    if copy == "always":
        return (_EVERYWHERE,)
    folders, parents = list[str](), set[str]()
    for url in listed.kinds():
        parent = os.path.dirname(url)  # noqa: PTH120  (a list may have a million paths)
        if parent in parents or not is_local(url) or folder_of(url, folders) is not None:
            continue
        parents.add(parent)
        path = local_path(url).absolute()
        if file_system(path).is_elsewhere:
            above = [*reversed(path.parents)]
            folders.append(str(next((p for p in above if file_system(p).is_elsewhere), path.parent)))
    return tuple(folders)


def settled(settings: Settings, shards: ShardList, placed: Placed, nodes: int, *, logs: bool) -> ShardList:
    """The shards of a run with the folders that all of its processes on this node copy.

    Args:
        shards: with the folders of `folders_to_copy`.
        placed: the tier; keeps the decision until it is closed.
        nodes: that share the shards.
        logs: whether this process says what was decided.
    """
    if not shards.copied:
        return shards
    if settings.copy == "always":
        answer = Choice(_EVERYWHERE, f"files are copied into the cache at {placed.tier.root} (copy='always')")
    else:
        question = ["copy", str(placed.tier.root), fingerprint(shards)]
        agreement = SharedDecision(memory_root(settings), question)
        placed.on_close.append(agreement.close)
        tier = placed.tier
        answer = agreement.join(lambda: decide(shards, tier.root, tier.budget.allowed_bytes, nodes))
    if logs:
        logger.log(logging.INFO if answer.chosen else logging.WARNING, "%s", answer.why)
    return decided(shards, answer)


def decided(shards: ShardList, answer: Choice) -> ShardList:
    """The shards with the folders that were chosen."""
    return shards.copied_below(tuple(filter(None, answer.chosen.split("\n"))))


def decide(shards: ShardList, root: Path, kept_bytes: int, nodes: int = 1) -> Choice:
    """Choice of "auto": the folders to copy, one a line, and a sentence about what was found.

    Args:
        shards: with the folders of `folders_to_copy`.
        root: of the tier.
        kept_bytes: what it can keep.
        nodes: that share the shards.
    """
    place, kinds = file_system(root), {folder: file_system(Path(folder)) for folder in shards.copied}
    shown = ", ".join(f"{kind.kind} at {folder}" for folder, kind in kinds.items())
    folders = [folder for folder, kind in kinds.items() if kind.device != place.device]
    if place.is_memory:
        reason = f"the cache at {root} is in memory"
    elif not folders:
        reason = f"the cache at {root} is on the same one"
    else:
        data_bytes = _data_bytes(shards.copied_below((*folders,))) // nodes
        reason = f"the cache at {root} can keep {format_bytes(kept_bytes)}"
        reason += f" of about {format_bytes(data_bytes)}" if data_bytes else ""
        if data_bytes <= _LEAST_SHARE * kept_bytes:
            which = f" from {', '.join(folders)}" if len(folders) < len(kinds) else ""
            why = f"shards are on a network file system ({shown}), and copied{which}: {reason}"
            return Choice("\n".join(folders), why)
        reason += ", less than a fifth"
    return Choice(
        "",
        f"shards are on a network file system ({shown}), and read there in each epoch, as {reason}. To have "
        f"them copied, set STREAMLOAD_CACHE_DIR to a larger local disk, or STREAMLOAD_COPY=always",
    )


def _data_bytes(shards: ShardList) -> int:
    """About the size of all shards that are copied, by some of them; 0 if none of these answers."""
    looked_at = spread(shards)
    copied = [shard for shard in looked_at if shard.is_copied]
    probes = copied[:: -(-len(copied) // _SHARDS_ASKED) or 1]
    with limits.Threads(max(1, len(probes)), "streamload-sizes") as pool:
        sizes = [size for size in pool.map(origin_size, probes) if size is not None]
    return sum(sizes) * len(copied) * len(shards) // (len(sizes) * len(looked_at)) if sizes else 0

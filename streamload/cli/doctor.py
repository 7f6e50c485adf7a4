"""`streamload doctor`: every setting with its source, the installed libraries, and what would not work."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamload.cli.options import AsJson, StorageOptions, storage_options_of
from streamload.cli.terminal import console, format_bytes, print_table

if TYPE_CHECKING:
    from streamload.cache.shard import ShardList
    from streamload.options import Option, Settings

_LIBRARIES = "streamload torch numpy pillow simplejpeg fsspec urllib3 webdataset xxhash"
_OPTIONAL = ("s3fs", "transformers", "open_clip_torch")
_LITTLE_ROOM_BYTES = 1_000_000_000
_BATCH_SIZE = 64
_MOST_ASKED = 64
"""Maximum number of shards to request."""
_ATTEMPTS = 3
_LITTLE_ROOM = (
    "This is little: shards that don't fit are read from their origin in every epoch. Make room, or set "
    "STREAMLOAD_CACHE_DIR and STREAMLOAD_CACHE_SIZE."
)
_ON_NETWORK = (
    "The cache is on a network: it may be no faster than the origin, and locks may not hold between nodes. "
    "Set STREAMLOAD_CACHE_DIR to a directory on a local disk."
)
_NO_RANGES = (
    "It gives all of a shard for each request: transfers that break are fetched from the first byte again, "
    "and shards that find no room in the cache are kept in memory, as no sample can be fetched alone."
)
_FEW_FILES = 4096
_FEW_PROCESSES = 512
_FEW_MAPS = 65_530
"""The kernel's default."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        advice: what to do about it; "" if it is fine.
        unusable: whether a run would fail because of it.
    """

    subject: str
    value: str
    source: str = ""
    advice: str = ""
    unusable: bool = False


def doctor(
    urls: Annotated[
        list[str] | None,
        typer.Argument(help="Shards, as for make_loader: are they available, and does the cache fit?"),
    ] = None,
    storage_options: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Show every setting and check the machine.

    Each value is shown with its source. With URLS, requests the first and the last shard of each source. The
    exit code is 1 if something can't be used or a shard isn't available; the report says what to do.
    """
    findings = [*examine(), *_data(urls or []), *_shards(urls or [], storage_options)]
    is_ok = not any(finding.unusable for finding in findings)
    if as_json:
        print(json.dumps({"ok": is_ok, "findings": [asdict(finding) for finding in findings]}))
    else:
        _show(findings)
    if not is_ok:
        raise typer.Exit(1)


def _show(findings: list[Finding]) -> None:
    from rich.markup import escape
    from rich.text import Text

    marks = {"✗": "red", "!": "yellow", "✓": "green"}
    rows = []
    for finding in findings:
        mark = "✗" if finding.unusable else "!" if finding.advice else "✓"
        rows.append((Text(mark, marks[mark]), finding.subject, finding.value, finding.source))
    print_table(("", "", "value", "from"), rows)
    for finding in findings:
        if finding.advice:
            console().print(f"\n[bold]{finding.subject}[/]: {escape(finding.advice)}")


def examine() -> list[Finding]:
    """All findings, in the order of the report."""
    return [*_settings(), *_libraries(), *_machine(), *_commands()]


def _settings() -> list[Finding]:
    from streamload.errors import OptionError
    from streamload.options import options, read_settings

    try:
        settings = read_settings()
    except OptionError as exc:
        return [Finding("settings", "can't be read", "", str(exc), unusable=True)]
    rows = []
    for option in options():
        source = settings.sources[option.name]
        source = f"default ({option.variable} is not set)" if source == "default" else source
        rows.append(Finding(_label(option), _shown(option, settings), source))
    return [*rows, *_cache(settings), *_shared(settings)]


def _label(option: "Option[Any]") -> str:
    label = {"cache_dir": "cache directory", "max_image_pixels": "largest image"}.get(option.name)
    return label or option.name.replace("_", " ")


def _shown(option: "Option[Any]", settings: "Settings") -> str:
    """An option's value for people; for some with what follows from it on this machine."""
    from streamload.urls import redact

    value = getattr(settings, option.name)
    if option.name in _EXPLAINED:
        return _EXPLAINED[option.name](settings)
    if option.is_secret:
        return redact(value) if value else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if size := getattr(value, "size_bytes", None):
        return format_bytes(size)
    shown = {"bytes": format_bytes, "seconds": "{:g} s".format, "pixels": "{:,} pixels".format}
    return shown[option.unit](value) if option.unit else str(value)


def _kept_free(settings: "Settings") -> str:
    from streamload.options import nearest

    disk = shutil.disk_usage(nearest(settings.cache_dir))
    return f"{format_bytes(settings.free_disk.floor_bytes(disk.total, disk.free))} ({settings.free_disk})"


def _where(settings: "Settings") -> str:
    """Which tier a run would take, and why."""
    from streamload.cache.placement import memory_budget, why_no_disk
    from streamload.cache.tier import memory_root
    from streamload.errors import CacheError

    on_disk, in_memory = f"on disk at {settings.cache_dir}", f"in memory at {memory_root(settings)}"
    if settings.cache != "auto":
        return in_memory if settings.cache == "memory" else on_disk
    try:
        most_bytes = memory_budget(settings)
    except CacheError as exc:
        return f"auto: {on_disk}, as {exc}"
    no_disk = why_no_disk(settings.cache_dir)
    if no_disk:
        return f"auto: {in_memory}, as {no_disk}"
    return f"auto: in memory if the data is known to take at most {format_bytes(most_bytes)}, else on disk"


def _memory_size(settings: "Settings") -> str:

    size = settings.memory_size
    return f"{size} of what is free" if size.size_bytes is None else format_bytes(size.size_bytes)


_EXPLAINED: "dict[str, Callable[[Settings], str]]" = {
    "free_disk": _kept_free,
    "cache": _where,
    "memory_size": _memory_size,
}


def _cache(settings: "Settings") -> list[Finding]:
    from streamload.cache.placement import memory_budget, why_no_disk
    from streamload.cache.tier import memory_root
    from streamload.errors import CacheError

    size = settings.cache_size.size_bytes
    if settings.cache == "disk":
        return _cache_dir(settings.cache_dir, size)
    try:
        room = Finding(
            "room in memory", f"{format_bytes(memory_budget(settings))} at {memory_root(settings)}"
        )
    except CacheError as exc:
        needed = settings.cache == "memory" or bool(why_no_disk(settings.cache_dir))
        room = Finding("room in memory", "too little", advice=str(exc), unusable=needed)
    if settings.cache == "memory" or (not room.advice and why_no_disk(settings.cache_dir)):
        return [room]
    return [room, *_cache_dir(settings.cache_dir, size)]


def _cache_dir(directory: Path, size_bytes: int | None) -> list[Finding]:
    from streamload.cache.placement import why_not_writable
    from streamload.options import file_system, nearest

    place = file_system(directory)
    advice = _ON_NETWORK if place.is_elsewhere else ""
    where = Finding("file system", f"{place.kind} at {place.mount_point}", advice=advice)
    refused = why_not_writable(directory)
    if refused:
        advice = (
            f"{refused}. Set STREAMLOAD_CACHE_DIR to a directory that you may write to, or "
            "STREAMLOAD_CACHE=memory to keep shards in memory."
        )
        return [where, Finding("writable", "no", advice=advice, unusable=True)]
    free_bytes = shutil.disk_usage(nearest(directory)).free
    advice = _LITTLE_ROOM if min(free_bytes, size_bytes or free_bytes) < _LITTLE_ROOM_BYTES else ""
    room = Finding("free", format_bytes(free_bytes), advice=advice)
    return [where, Finding("writable", "yes"), room]


def _shared(settings: "Settings") -> list[Finding]:
    from streamload.cache.shared.sharing import SharedOptions
    from streamload.errors import StreamloadError
    from streamload.metrics import Counters

    if settings.shared_cache is None:
        return []
    findings = []
    try:
        options = SharedOptions.of(settings)
        assert options is not None
        tier = options.open_tier(Counters())
        findings.append(Finding("its shards", "can be read" if tier.check_format() else "none yet"))
        if settings.write_back:
            conditions = "" if tier.objects.has_conditions else ", without conditions"
            findings.append(Finding("its storage", f"can be written{conditions}"))
    except StreamloadError as exc:
        is_invalid = isinstance(exc, ValueError)  # that ends trainings, too
        advice = str(exc) if is_invalid else f"{exc}. Trainings go on without it."
        findings.append(Finding("its answer", "an error", advice=advice, unusable=is_invalid))
    return findings


def _data(urls: list[str]) -> list[Finding]:
    """Fit of the cache to these shards, at the loader's default batch size."""
    from streamload.cache.copying import folders_to_copy
    from streamload.cache.forecast import forecast
    from streamload.cache.shard import ShardList
    from streamload.cli.cache import tier_at
    from streamload.errors import StreamloadError
    from streamload.options import read_settings
    from streamload.order.lanes import default_lanes
    from streamload.order.shuffle import default_window
    from streamload.urls import expand_urls

    if not urls:
        return []
    findings: list[Finding] = []
    try:
        settings, listed = read_settings(), expand_urls(urls)
        shards = ShardList(listed, None, copied=folders_to_copy(listed, settings.copy))
        if settings.copy == "auto" and shards.copied:
            finding, shards = _mounts(shards, settings)
            findings.append(finding)
        tier = tier_at(None)
    except StreamloadError as exc:
        return [*findings, Finding("data", "nothing known yet", advice=str(exc))]
    prediction = forecast(tier, shards, default_lanes(_BATCH_SIZE), default_window(_BATCH_SIZE))
    return [*findings, Finding("data", f"{prediction}, at a batch size of {_BATCH_SIZE}")]


def _mounts(shards: "ShardList", settings: "Settings") -> "tuple[Finding, ShardList]":
    """Whether a run would copy shards from network file systems, and the shards as it would read them."""
    from streamload.cache.copying import decide, decided
    from streamload.cli.cache import tier_at
    from streamload.errors import CacheError
    from streamload.options import nearest

    root, size = settings.cache_dir, settings.cache_size
    try:
        kept_bytes = tier_at(str(root)).budget.allowed_bytes
    except CacheError:
        kept_bytes = size.limit_bytes(shutil.disk_usage(nearest(root)).free, 0)
    answer = decide(shards, root, kept_bytes)
    if answer.chosen:
        return Finding("mounts", answer.why), decided(shards, answer)
    return Finding("mounts", "read in place", advice=answer.why), decided(shards, answer)


def _shards(urls: list[str], storage_options: str | None) -> list[Finding]:
    from streamload import limits
    from streamload.errors import StreamloadError
    from streamload.urls import expand_urls, redact, split_sources

    if not urls:
        return []
    try:
        storage = storage_options_of(storage_options)
        sources = [expand_urls(source, storage) for source in split_sources(urls)]
    except StreamloadError as exc:
        return [Finding("shards", "can't be listed", advice=str(exc), unusable=True)]
    ends = list(dict.fromkeys(shard for source in sources for shard in (source[0], source[len(source) - 1])))
    urls_to_try = ends[:: -(-len(ends) // _MOST_ASKED)]
    with limits.Threads(8, "streamload-look") as pool:
        reasons = pool.map(lambda url: _why_unavailable(url, storage), urls_to_try)
    refused = [(url, why) for url, why in zip(urls_to_try, reasons, strict=True) if why]
    available = f"{len(urls_to_try) - len(refused)} of {len(urls_to_try)} first and last ones are available"
    return [
        Finding("shards", available, unusable=bool(refused)),
        *_servers(urls_to_try),
        *(Finding(redact(url), "unavailable", advice=why, unusable=True) for url, why in refused),
    ]


def _servers(urls: list[str]) -> list[Finding]:
    """Abilities of the web servers of these shards, as far as they have shown them."""
    from streamload.origins.endpoints import Abilities
    from streamload.origins.origin import abilities_of
    from streamload.urls import endpoint, redact

    by_server: dict[str, Abilities] = {endpoint(redact(url)): abilities_of(url) for url in urls}
    return [
        Finding(server, str(shown), advice=_NO_RANGES if shown.ranges is False else "")
        for server, shown in by_server.items()
        if shown != Abilities()
    ]


def _why_unavailable(url: str, storage_options: dict[str, Any] | None) -> str:
    """Why a shard's first header can't be read, or ""."""
    from contextlib import closing

    from streamload.errors import StreamloadError
    from streamload.origins.origin import OriginOptions, open_origin
    from streamload.shards.tar import BLOCK_BYTES, TarParser
    from streamload.urls import redact

    try:
        with closing(open_origin(url, storage_options, OriginOptions(attempts=_ATTEMPTS))) as origin:
            TarParser().feed(origin.read(0, BLOCK_BYTES, origin.version()))
    except (StreamloadError, OSError) as exc:
        return str(exc).removeprefix(f"{redact(url)}: ")
    return ""


def _libraries() -> list[Finding]:
    from importlib.metadata import PackageNotFoundError, version

    findings = [Finding("python", sys.version.split()[0])]
    for name in (*_LIBRARIES.split(), *_OPTIONAL):
        try:
            findings.append(Finding(name, version(name)))
        except PackageNotFoundError:
            if name in _OPTIONAL:
                findings.append(Finding(name, "not installed (optional)"))
            else:
                advice = f"Install it: python -m pip install {name}"
                findings.append(Finding(name, "not installed", advice=advice, unusable=True))
    return [*findings, _resizing()]


def _resizing() -> Finding:
    """What resizes images: our kernel, torch, or Pillow where torch has no vector code."""
    from streamload.transforms.kernel import VECTORS, lost, why_not

    reason = why_not()
    if not reason:
        return Finding("resizing", f"by its own kernel, with {VECTORS}", advice=lost())
    try:
        from streamload.transforms.resize import torch_has_vectors

        path = "torch's kernel" if torch_has_vectors() else "Pillow (torch has no vector code here)"
    except ImportError:  # torch or Pillow is missing, which is a finding by itself
        path = "torch's kernel or Pillow"
    return Finding("resizing", f"by {path}, as {reason}", advice=lost())


def _machine() -> list[Finding]:
    from multiprocessing import get_all_start_methods, get_start_method

    findings = [
        Finding("cores", str(len(os.sched_getaffinity(0)))),
        Finding("processes by", get_start_method(allow_none=True) or get_all_start_methods()[0]),
    ]
    findings += _limits()
    if not sys.platform.startswith("linux"):
        advice = "streamload is built and tested on Linux; it may work elsewhere."
        findings.append(Finding("system", sys.platform, advice=advice))
    return findings


def _limits() -> list[Finding]:
    from streamload import limits

    limits.allow_many_files()  # as a run does
    files = limits.most_files()
    advice = ""
    if files < _FEW_FILES:
        advice = (
            f"This is little: where many shards are open at once, some are closed and opened again, which "
            f"takes time. Allow {_FEW_FILES} (ulimit -Hn {_FEW_FILES}, LimitNOFILE=, "
            f"--ulimit nofile={_FEW_FILES})."
        )
    findings = [Finding("open files", f"{files:,} for each process", advice=advice)]
    processes = limits.process_limit()
    if processes is not None:
        name, most = processes
        few = "This is little for a training and its workers: allow more, or use fewer workers."
        advice = few if most < _FEW_PROCESSES else ""
        findings.append(Finding("processes and threads", f"{most:,} ({name})", advice=advice))
    _, most_maps = limits.map_count()
    if most_maps:
        few = f"This is little: set it to {_FEW_MAPS} (sysctl vm.max_map_count)."
        findings.append(Finding("memory maps", f"{most_maps:,}", advice=few if most_maps < _FEW_MAPS else ""))
    return findings


def _commands() -> list[Finding]:
    missing = "not installed (only pipe: URLs need it)"
    return [Finding(command, shutil.which(command) or missing) for command in ("bash", "curl", "aws")]

"""The README's chart and tables: streamload beside the peers, from the results of four benchmarks."""

from collections.abc import Callable

from benchmarks import charts, provenance
from benchmarks.charts import Bar
from benchmarks.markdown import Result, table

NEEDED = {"cold", "warm", "half", "resume"}
_PEERS = (
    "open_clip",
    "webdataset, cache_dir",
    "SPDL",
    "Hugging Face datasets",
    "LitData",
    "MosaicML Streaming",
)
_OWN_PIXELS = ("SPDL", "DALI")
_LINK = "40 MB/s"
_NO_LOADERS = ("floor", "streamload", "with colour jitter")


def charts_of(results: dict[str, Result]) -> dict[str, tuple[str, str]]:
    """The chart's title and its SVG; none where a result is missing."""
    if not results.keys() >= {"cold", "warm"}:
        return {}
    names = ("streamload", fastest_peer(results["warm"]), "open_clip")
    title = "streamload, the fastest other loader, and open_clip's own"
    several = {
        "Images per second, shards near": (
            [_bar(results["warm"], name, "images_per_second") for name in names],
            0,
        ),
        f"Seconds to the first batch, empty cache, {_LINK}": (
            [_bar(results["cold"], name, "first_batch_seconds", f" at {_LINK}") for name in names],
            2,
        ),
    }
    return {"overview": (title, charts.panels(title, several))}


def fastest_peer(warm: Result) -> str:
    """The loader of others with the most images per second."""
    peers = [name for name in warm["medians"] if not any(word in name for word in _NO_LOADERS)]
    return max(peers, key=lambda name: warm["medians"][name]["images_per_second"])


def _bar(result: Result, name: str, metric: str, suffix: str = "") -> Bar:
    label = name + suffix
    values = [row[metric] for row in result["rounds"] if row["label"] == label]
    return Bar(name, result["medians"][label][metric], min(values), max(values), name == "streamload")


def beside(results: dict[str, Result], most: int | None = None) -> str:
    """A row for each thing that a loader does, a column for each loader.

    Args:
        results: by name.
        most: so many rows, the first ones; None: all.

    Raises:
        Unproven: a result doesn't say where it comes from.
    """
    for name in sorted(NEEDED):
        provenance.refuse_unproven(name, results[name])
    cold, half = results["cold"], results["half"]
    of_data = f"{cold['settings']['bytes'] / 1e6:.0f} MB"
    limit = f"{half['settings']['limit_bytes'] / 1e6:.0f} MB"
    rows: dict[str, Callable[[dict[str, Result], str], str]] = {
        f"first batch at {_LINK}, s": _first_batch,
        "images/s on 2 cores": _images_per_second,
        f"fetched again in epoch 2, of {of_data}": _fetched_again,
        "reads the tars as they are": _reads_tars,
        f"cache at most, where the limit is {limit}": _held,
        "resumed in mid-epoch: samples lost": _lost,
        "fetched again to resume": _fetched_to_resume,
        "images/s with a transform of one's own": _with_own_transform,
    }
    names = ("streamload", *_PEERS)
    body = [[row, *(value(results, name) for name in names)] for row, value in [*rows.items()][:most]]
    return table(["", *names], body)


def _first_batch(results: dict[str, Result], name: str) -> str:
    return f"{results['cold']['medians'][f'{name} at {_LINK}']['first_batch_seconds']:.2f}"


def _reads_tars(results: dict[str, Result], name: str) -> str:
    return "converted first" if name in results["cold"]["conversions"] else "yes"


def _fetched_again(results: dict[str, Result], name: str) -> str:
    return f"{results['cold']['medians'][f'{name} at {_LINK}']['epoch_2_bytes'] / 1e6:.0f} MB"


def _held(results: dict[str, Result], name: str) -> str:
    medians = results["half"]["medians"]
    held = [row["held_bytes"] for label, row in medians.items() if label.startswith(f"{name}, epoch ")]
    if held:
        return f"{max(held) / 1e6:.0f} MB"
    if any(failure["contender"] == name for failure in results["half"]["failures"]):
        return "ends with an error"
    return "no cache"


def _lost(results: dict[str, Result], name: str) -> str:
    found = results["resume"]["medians"].get(name)
    return "can't resume there" if found is None else f"{found['lost']:,.0f} of {found['to_come']:,.0f}"


def _fetched_to_resume(results: dict[str, Result], name: str) -> str:
    found = results["resume"]["medians"].get(name)
    return "–" if found is None else f"{found['fetched_bytes'] / 1e6:.0f} MB"


def to_measure_again(sources: set[str]) -> str:
    """Return a sentence on those of the results that aren't of a commit that anyone can measure again."""
    listed = sorted(sources & provenance.TO_MEASURE_AGAIN)
    if not listed:
        return "Each result is of a commit of this history and a clean tree."
    return f"To be measured again, in a clean tree: {', '.join(listed)}."


def _with_own_transform(results: dict[str, Result], name: str) -> str:
    """Where the transform runs as it is: open_clip's, which the peers call, stands for any."""
    if name.startswith(_OWN_PIXELS):
        return "–"
    medians = results["warm"]["medians"]
    label = "streamload, preprocess as given" if name == "streamload" else name
    return f"{medians[label]['images_per_second']:,.0f}"


def _images_per_second(results: dict[str, Result], name: str) -> str:
    return f"{results['warm']['medians'][name]['images_per_second']:,.0f}"

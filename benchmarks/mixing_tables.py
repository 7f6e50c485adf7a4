"""The tables of mixing_policies.json and mixing_clip.json, and the picture of the former."""

import statistics

from benchmarks.markdown import Result, table
from benchmarks.worlds.picture import Series, drawing


def policies(result: Result) -> str:
    """By kind of world, the mean score and the worst one of each policy; the moves of equal sources."""
    names = list(result["scores"])
    rows = []
    for kind in next(iter(result["scores"].values())):
        cells = [result["scores"][name][kind] for name in names]
        label = "**all**" if kind == "all" else kind.replace("_", " ")
        rows.append([label, *(f"{mean:+.2f} [{worst:+.2f}]" for mean, worst in cells)])
    for label, measure in (
        ("moves of equal sources, mean [most]", "equal_moves"),
        ("of these away from equal shares", "false_moves"),
    ):
        moves = [result[measure][name] for name in names]
        rows.append([label, *(f"{mean:.2f} [{most}]" for mean, most in moves)])
    others = result["progress in other worlds"]
    score = f"{statistics.mean(others):+.2f} [{min(others):+.2f}]"
    rows.append(["other worlds of all kinds", *(score if name == "progress" else "" for name in names)])
    return table(["worlds", *names], rows)


def clip(result: Result) -> str:
    """By seed and contender, the held-out losses and the samples of each source."""
    rows = []
    by = {(row["label"], row["round"]): row for row in result["rounds"]}
    for seed in result["seeds"]:
        for name in result["medians"]:
            one = by[name, seed]
            losses = [one["held_out_loss"], one["without_noise"], *one["losses"].values()]
            shares = (f"{taken / sum(one['samples'].values()):.0%}" for taken in one["samples"].values())
            rows.append([f"{seed}, {name}", *(f"{loss:.3f}" for loss in losses), " / ".join(shares)])
    names = list(result["rounds"][0]["losses"])
    return table(["seed", "all sources", "without noise", *names, "shares of the samples"], rows)


def charts_of(results: dict[str, Result]) -> dict[str, tuple[str, str]]:
    """The courses of `Progress` in some worlds: the title and the SVG."""
    if "mixing_policies" not in results:
        return {}
    title = "Progress in simulated trainings: shares by step"
    panels: dict[str, Series] = {}
    for kind, course in results["mixing_policies"]["courses"].items():
        panels[f"{kind}: score {course['score']:+.2f}"] = {
            name: list(zip(course["steps"], shares, strict=True)) for name, shares in course["shares"].items()
        }
    return {"mixing_courses": (title, drawing(title, panels))}

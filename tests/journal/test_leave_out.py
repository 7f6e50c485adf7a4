"""Samples that are left out of a training: others take their places, and every other row stays."""

from __future__ import annotations

import itertools
import json
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

import streamload
from streamload import Source
from streamload.errors import OptionError, StateMismatch
from streamload.testing.resume import Layout
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from tests.support import flat

COUNTS = [40, 31, 44, 36, 25, 38]
STEP = 12
"""Samples of a step, over all ranks."""
Row = tuple[str, str]
"""URL and key of a sample."""
Rows = list[list[Row]]
"""Of a step, by rank."""
LAYOUTS = [Layout(1, 0), Layout(2, 0), Layout(1, 2), Layout(4, 0), Layout(2, 1)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders; keys are the same in both."""
    place = tmp_path_factory.mktemp("data")
    for number, name in enumerate(("a", "b")):
        write_shards(place / name, COUNTS, seed=number, options=ShardOptions(image_side=(8, 24)))
    return place


def tokens(captions: list[str]) -> dict[str, torch.Tensor]:
    """Ids of 1 to 30 tokens, by the caption."""
    valid = torch.tensor(
        [[place <= zlib.crc32(text.encode()) % 30 for place in range(30)] for text in captions]
    )
    return {"input_ids": valid.long(), "attention_mask": valid.long()}


def width(image: Any) -> torch.Tensor:
    return torch.tensor([float(image.size[0])])


def make(urls: Any, cache: Path, layout: Layout = LAYOUTS[0], rank: int = 0, **options: Any) -> Any:
    defaults = {"preprocess": width, "output": "dict", "with_keys": True, "cache_size": "1GB", "groups": 1}
    defaults |= {"shuffle": 30, "lanes": 3, "rank": rank, "world_size": layout.ranks}
    return flat.make_loader(
        urls if isinstance(urls, list) else str(urls),
        options.pop("tokenizer", tokens),
        batch_size=STEP // layout.ranks,
        num_workers=layout.workers,
        cache_dir=cache,
        **defaults | options,
    )


class Training:
    """The ranks of a run in this process, in step; their workers are real."""

    def __init__(self, urls: Any, cache: Path, layout: Layout, **options: Any):
        self.loaders = [make(urls, cache, layout, rank, **options) for rank in range(layout.ranks)]
        self.states: list[list[dict[str, Any]]] = []

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        for loader in self.loaders:
            loader.close()

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        for loader in self.loaders:
            loader.load_state_dict(json.loads(json.dumps(states)))

    def steps(self) -> Iterator[Rows]:
        """Of an epoch; `states` has those of the ranks after each."""
        for batches in zip(*self.loaders, strict=True):
            yield [[*zip(batch["__url__"], batch["__key__"], strict=True)] for batch in batches]

    def run(
        self,
        epochs: int = 1,
        leave_out: Mapping[int, Sequence[Any]] | None = None,
        weights: Mapping[int, Any] | None = None,
    ) -> tuple[list[Rows], dict[int, int]]:
        """The steps of epochs, and by the step of each call the one from which it holds, of the run.

        Args:
            epochs: that are run.
            leave_out: by the step of the run after which they are named.
            weights: the same of weights.
        """
        steps: list[Rows] = []
        held: dict[int, int] = {}
        self.states = [[loader.state_dict() for loader in self.loaders]]
        for _ in range(epochs):
            first = len(steps)
            for rows in self.steps():
                steps.append(rows)
                for loader in self.loaders if len(steps) in (weights or {}) else ():
                    loader.set_weights(weights[len(steps)])
                if len(steps) in (leave_out or {}):
                    named = leave_out[len(steps)]
                    (step,) = {loader.leave_out(named, why="the loss rose") for loader in self.loaders}
                    held[len(steps)] = first + step
                self.states.append([loader.state_dict() for loader in self.loaders])
            held = {call: min(step, len(steps)) for call, step in held.items()}
        return steps, held


def is_in(row: Row, named: Sequence[Any]) -> bool:
    return row in named or row[1] in named


def assert_replaced(steps: list[Rows], plain: list[Rows], named: Sequence[Any], since: int = 0) -> int:
    """Compare a run with one that leaves nothing out; return how many rows changed."""
    assert [[len(rows) for rows in step] for step in steps] == [
        [len(rows) for rows in step] for step in plain
    ]
    changed = 0
    for number, (step, expected) in enumerate(zip(steps, plain, strict=True)):
        for row, other in zip(itertools.chain(*step), itertools.chain(*expected), strict=True):
            if number >= since and is_in(other, named):
                changed += 1
                assert not is_in(row, named), number
                assert row[0].rpartition("/")[0] == other[0].rpartition("/")[0]  # of the same source
            else:
                assert row == other, number
    return changed


def pick(steps: list[Rows], *numbers: int) -> list[str]:
    """Keys of rows of the second half of the run."""
    later = [key for step in steps[len(steps) // 2 :] for rows in step for _, key in rows]
    return [later[number] for number in numbers]


def with_name(data: Path, name: str) -> dict[str, Any]:
    """Options of a run, by its name."""
    both = [Source(str(data / "a"), 2, "a"), Source(str(data / "b"), 1, "b")]
    return {
        "plain": {},
        "epochs": {"num_batches": 13},
        "weights": {"urls": both, "num_batches": 26},
        "groups": {"groups": 4, "num_batches": 13},
        "buckets": {"bucketing": 36, "text_padding": "longest"},
        "agreed buckets": {"cost": "width", "num_batches": 13},
        "repeat": {"repeat": (twice, "1")},
        "keep": {"keep": most},
    }[name]


def twice(entry: streamload.Entry) -> float:
    return 1.5


def most(entry: streamload.Entry) -> bool:
    return int(entry.key[-1]) != 3


RUNS = ["plain", "weights", "epochs", "buckets", "groups", "agreed buckets", "repeat", "keep"]
CASES = [
    pytest.param(
        name,
        layout,
        marks=() if (name, layout) in (("plain", LAYOUTS[4]), ("buckets", LAYOUTS[2])) else pytest.mark.deep,
    )
    for name in RUNS
    for layout in LAYOUTS
    if name != "groups" or layout.ranks in (1, 2, 4)
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_only_the_places_of_samples_that_are_left_out_have_others(
    name: str, layout: Layout, data: Path, tmp_path: Path
) -> None:
    options = with_name(data, name)
    urls, cache = options.pop("urls", data / "a"), tmp_path / "cache"
    weights = {5: {"a": 1, "b": 3}} if name == "weights" else {}
    with Training(urls, cache, layout, **options) as training:
        plain, _ = training.run(2, weights=weights)
    named = pick(plain, 0, 30, 31, 77, 90)
    file = tmp_path / "left_out.txt"
    with Training(urls, cache, layout, leave_out=file, **options) as training:
        steps, held = training.run(2, {4: named}, weights)
        assert not any(loader.skipped for loader in training.loaders)
        stats = [loader.stats() for loader in training.loaders]
    assert 4 <= held[4] <= 4 + layout.workers * 2 + 1
    changed = assert_replaced(steps, plain, named, held[4])
    assert changed >= 5
    assert sum(counted.samples_replaced["left_out"] for counted in stats) == changed
    assert sum(sum(counted.samples_replaced.values()) for counted in stats) == changed
    with Training(urls, cache, layout, leave_out=file, **options) as training:
        from_start, _ = training.run(2, weights=weights)
    assert assert_replaced(from_start, plain, named) >= changed
    assert from_start[held[4] :] == steps[held[4] :]


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(name, marks=pytest.mark.deep) for name in RUNS[1:])]
)
def test_ranks_and_workers_change_no_substitute(name: str, data: Path, tmp_path: Path) -> None:
    options = with_name(data, name)
    urls, file = options.pop("urls", data / "a"), tmp_path / "left_out.txt"
    with Training(urls, tmp_path / "cache", LAYOUTS[0], **options) as training:
        plain, _ = training.run()
    file.write_text("\n".join(pick(plain, 3, 20, 41, 55)))
    runs = []
    layouts = [layout for layout in LAYOUTS if name != "buckets" or layout.ranks == 1]
    for layout in layouts:
        with Training(urls, tmp_path / "cache", layout, leave_out=file, **options) as training:
            steps, _ = training.run()
        runs.append([sorted(itertools.chain(*step)) for step in steps])
    assert runs[0] != [sorted(itertools.chain(*step)) for step in plain]
    assert runs == [runs[0]] * len(layouts)


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("plain", [3, 4, 6, 15]),
        *(pytest.param(name, range(1, 26), marks=pytest.mark.deep) for name in RUNS),
    ],
)
def test_a_run_resumes_with_the_calls_that_its_state_has(
    name: str, cuts: Sequence[int], data: Path, tmp_path: Path
) -> None:
    options = with_name(data, name)
    urls, cache, file = options.pop("urls", data / "a"), tmp_path / "cache", tmp_path / "place" / "left_out"
    with Training(urls, cache, LAYOUTS[0], **options) as training:
        plain, _ = training.run(2)
    first, second = pick(plain, 1, 20, 33, 60), pick(plain, 2, 34, 61)
    with Training(urls, cache, Layout(2, 1), leave_out=file, **options) as training:
        steps, held = training.run(2, {4: first, 14: [*second, first[0]]})
        states = training.states
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["key"], line["why"]) for line in lines] == [
        (key, "the loss rose") for key in first + second
    ]
    layouts = [Layout(1, 0), Layout(2, 1), Layout(1, 2), Layout(4, 0)]
    if name == "buckets":  # how wide a place is depends on the number of ranks, and so does its substitute
        layouts = [Layout(2, 1), Layout(2, 0)]
    for cut, layout in zip(cuts, itertools.cycle(layouts)):
        with Training(urls, cache, layout, leave_out=file, **options) as training:
            if cut >= len(states) - 1:
                continue
            training.load(states[cut])
            rest, _ = training.run(2 if states[cut][0]["epoch"] == 0 else 1)
        flattened = [sorted(itertools.chain(*step)) for step in rest]
        expected = [sorted(itertools.chain(*step)) for step in steps[cut:]]
        if cut < 4:  # a state from before the calls: nothing is left out, until it is named again
            expected = [sorted(itertools.chain(*step)) for step in plain[cut:]]
        elif cut < 14:
            expected = expected[: held[14] - cut]
        assert flattened[: len(expected)] == expected, cut
        if 4 <= cut < 14:
            later = [row for step in flattened[held[14] - cut :] for row in step]
            assert not any(is_in(row, first) for row in later)
            assert any(is_in(row, second) for row in later)
    assert len(file.read_text().splitlines()) == len(first + second)


def test_a_call_that_comes_again_after_a_resume_writes_nothing_twice(data: Path, tmp_path: Path) -> None:
    file, cache = tmp_path / "left_out", tmp_path / "cache"
    with Training(data / "a", cache, LAYOUTS[0], leave_out=file) as training:
        steps, _ = training.run(2, {6: (named := [f"{0:05d}{place:06d}" for place in range(9)])})
        state = training.states[2]
    written = file.read_text()
    with Training(data / "a", cache, LAYOUTS[0], leave_out=file) as training:
        training.load(state)
        again, _ = training.run(2, {4: named})
    assert again == steps[2:]
    assert file.read_text() == written


def test_a_call_after_a_resume_holds_before_an_earlier_one_that_is_still_to_come(
    data: Path, tmp_path: Path
) -> None:
    file, cache = tmp_path / "left_out", tmp_path / "cache"
    with Training(data / "a", cache, LAYOUTS[0]) as training:
        plain, _ = training.run()
    at_9, at_10 = ([key for _, key in plain[number][0][3:6]] for number in (8, 9))
    with Training(data / "a", cache, Layout(1, 2), leave_out=file) as training:
        _, held = training.run(1, {6: at_10})
        state = training.states[6]
    assert held == {6: 10}
    with Training(data / "a", cache, LAYOUTS[0], leave_out=file) as training:
        training.load(state)
        steps, held = training.run(1, {1: [*at_9, *at_10]})
        states = training.states
    assert held == {1: 7}
    assert assert_replaced(steps, plain[6:], [*at_9, *at_10]) == 6
    with Training(data / "a", cache, Layout(1, 1), leave_out=file) as training:
        training.load(states[1])
        assert training.run()[0] == steps[1:]


def test_lines_that_a_file_has_gained_hold_from_the_resume_on_and_lost_ones_are_refused(
    data: Path, tmp_path: Path
) -> None:
    file, cache, layout = tmp_path / "left_out", tmp_path / "cache", LAYOUTS[0]
    with Training(data / "a", cache, layout) as training:
        plain, _ = training.run()
        state_without = training.states[5]
    named = pick(plain, 3, 20)
    file.write_text(f"{named[0]}\n")
    with Training(data / "a", cache, layout, leave_out=file) as training:
        steps, _ = training.run(1, {7: pick(plain, 40)})
        states = training.states
    assert_replaced(steps[:7], plain[:7], named[:1])
    with file.open("a") as lines:
        lines.write(json.dumps({"key": named[1], "why": "a duplicate"}))  # without an end of line
    with Training(data / "a", cache, layout, leave_out=file) as training:
        training.load(states[5])
        rest, _ = training.run()
        assert assert_replaced(rest, plain[5:], named) == 2
        resumed = training.states[3]
        training.load(resumed)  # its own state has both
        assert training.run()[0] == rest[3:]
        training.load(states[8])
        assert assert_replaced(training.run()[0], plain[8:], [*named, *pick(plain, 40)]) == 3
        training.load(states[0])  # of a run that hadn't begun: all that the file has, from the start
        assert assert_replaced(training.run()[0], plain, [*named, *pick(plain, 40)]) == 3
        training.load(state_without)  # all that the file has, from here on
        assert assert_replaced(training.run()[0], plain[5:], [*named, *pick(plain, 40)]) == 3
    lines = file.read_text().splitlines(keepends=True)
    for changed, match in (
        (lines[1:], "the first 1 are changed or gone"),
        (["another\n", *lines[1:]], "the first 1 are changed or gone"),
        ([lines[0], lines[2]], r"1 of loader.leave_out\(\) are changed or gone"),
        ([], "lacks samples"),
    ):
        file.write_text("".join(changed))
        with make(data / "a", cache, leave_out=file) as loader, pytest.raises(StateMismatch, match=match):
            loader.load_state_dict(states[8][0])
    with make(data / "a", cache) as loader, pytest.raises(StateMismatch, match=r"Shards\(leave_out=FILE\)"):
        loader.load_state_dict(states[8][0])


def of_two_ranks(rank: int, data: Path, place: Path, named: list[list[str]]) -> None:
    """The ranks name other samples, with other numbers of workers and other files."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=2
    )
    file = place / f"left_out-{rank}"
    with make(data / "a", place / "cache", Layout(2, 1 + rank), rank, leave_out=file) as loader:
        steps, step = [], 0
        for number, batch in enumerate(loader):
            steps.append(batch["__key__"])
            if number == 3:
                step = loader.leave_out(named[rank], why="of this rank")
        with pytest.raises(OptionError, match="got 1; expected a list of keys"):
            loader.leave_out(["a"] if rank else [1])
        state = loader.state_dict()["leave_out"]
    (place / f"{rank}.json").write_text(json.dumps([steps, step, state]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_all_ranks_leave_out_what_rank_0_names_from_one_step_on(data: Path, tmp_path: Path) -> None:
    with Training(data / "a", tmp_path / "cache", Layout(2, 0)) as training:
        plain, _ = training.run()
    of_rank_0 = pick(plain, 3, 20, 41, 55)
    named = [of_rank_0[1:], pick(plain, 4, 21)]
    (tmp_path / "left_out-0").write_text(of_rank_0[0])
    (tmp_path / "left_out-1").write_text(pick(plain, 5)[0])  # rank 0's counts
    torch.multiprocessing.start_processes(
        of_two_ranks, (data, tmp_path, named), nprocs=2, start_method="fork"
    )
    (steps_0, step, state), (steps_1, step_1, state_1) = (
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)
    )
    assert (step, state) == (step_1, state_1)
    assert step == 4 + 2 * 2
    urls = {key: url for step in plain for rows in step for url, key in rows}
    steps = [
        [[(urls[key], key) for key in keys] for keys in step] for step in zip(steps_0, steps_1, strict=True)
    ]
    assert assert_replaced(steps[:step], plain[:step], of_rank_0[:1]) == 0
    assert assert_replaced(steps[step:], plain[step:], of_rank_0) == 4
    assert (tmp_path / "left_out-1").read_text() == pick(plain, 5)[0]


def test_a_pair_is_left_out_of_its_shard_alone_with_or_without_a_secret(data: Path, tmp_path: Path) -> None:
    with ShardServer(data / "a") as server, ShardServer(data / "b") as other:
        key = f"{2:05d}{7:06d}"
        urls = [
            Source(f"{at.url}/{{00000..00005}}.tar?token=secret", 1, name)
            for at, name in ((server, "a"), (other, "b"))
        ]
        options = {"num_batches": 40, "shuffle": 4, "lanes": 2}
        with Training(urls, tmp_path / "cache", LAYOUTS[0], **options) as training:
            plain, _ = training.run()
        shown = next(url for step in plain for url, name in step[0] if name == key and server.url in url)
        for number, url in enumerate(
            (shown, f"{server.url}/00002.tar?token=secret", f"{server.url}/00002.tar")
        ):
            file = tmp_path / f"left_out-{number}"
            with Training(urls, tmp_path / "cache", LAYOUTS[0], leave_out=file, **options) as training:
                assert training.loaders[0].leave_out([(url, key)]) == 0
                steps, _ = training.run()
            assert assert_replaced(steps, plain, [(shown, key)]) >= 1
            assert any(name == key for step in steps for _, name in step[0])
            assert "secret" not in file.read_text()


def spoiled(path: Path, keys: set[str], folder: Path) -> None:
    """Write a shard whose samples of these keys have no image that can be decoded."""
    import io
    import tarfile

    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / path.name, "w") as tar:
        for key, members in read_oracle(path):
            for extension, payload in members.items():
                content = b"\xff\xd8 none" if key in keys and extension == "jpg" else payload
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def test_bad_samples_count_as_ever_and_no_sample_left_out_takes_their_places(
    data: Path, tmp_path: Path
) -> None:
    bad = {f"{shard:05d}{place:06d}" for shard in range(6) for place in range(0, 24, 12)}
    for path in sorted((data / "a").iterdir()):
        spoiled(path, bad, tmp_path / "data")
    options = {"max_bad_samples": 0.1, "shuffle": 0, "lanes": 1}
    named = [f"{shard:05d}{place:06d}" for shard in range(6) for place in range(4, 24) if place % 12]
    file = tmp_path / "left_out"
    file.write_text("\n".join(named))
    with Training(tmp_path / "data", tmp_path / "cache", LAYOUTS[0], leave_out=file, **options) as training:
        steps, _ = training.run()
        (loader,) = training.loaders
        counted, skipped = loader.stats().samples_replaced, [sample.key for sample in loader.skipped]
    assert sum(COUNTS) // STEP == len(steps)
    assert {*skipped} == bad
    assert counted["decode"] == len(bad)
    assert counted["left_out"] == len(named)
    assert not {key for step in steps for _, key in step[0]} & {*bad, *named}


def test_with_on_error_raise_a_sample_that_is_left_out_may_be_bad(data: Path, tmp_path: Path) -> None:
    bad = f"{1:05d}{3:06d}"
    spoiled(data / "a" / "00001.tar", {bad}, tmp_path / "data")
    file = tmp_path / "left_out"
    file.write_text(bad)
    with make(tmp_path / "data", tmp_path / "cache", leave_out=file, on_error="raise") as loader:
        assert bad not in {key for batch in loader for key in batch["__key__"]}
        assert loader.stats().samples_replaced["left_out"] == 1


def test_where_all_near_a_sample_are_left_out_the_error_says_so(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "left_out"
    file.write_text("\n".join(f"{shard:05d}{place:06d}" for shard in range(6) for place in range(44)))
    with (
        make(data / "a", tmp_path / "cache", leave_out=file) as loader,
        pytest.raises(streamload.errors.TooManyBadSamples, match="near it: it is left out"),
    ):
        next(iter(loader))


def test_cells_go_without_their_samples_and_are_planned_as_before(data: Path, tmp_path: Path) -> None:
    options = {"cost": "width", "max_tokens": 120, "tokenizer": None, "num_batches": 6}
    with Training(data / "a", tmp_path / "cache", LAYOUTS[0], **options) as training:
        plain, _ = training.run(2)
    named = pick(plain, 3, 20, 41, 55, 90)
    for layout in LAYOUTS[:3]:
        file = tmp_path / f"left_out-{layout}"
        with Training(data / "a", tmp_path / "cache", layout, leave_out=file, **options) as training:
            steps, held = training.run(2, {3: named})
            states = training.states
        for number, (step, expected) in enumerate(zip(steps, plain, strict=True)):
            rest = [row for row in expected[0] if number < held[3] or not is_in(row, named)]
            assert [*itertools.chain(*step)] == rest
        with Training(data / "a", tmp_path / "cache", LAYOUTS[0], leave_out=file, **options) as training:
            training.load(states[4])
            assert [[*itertools.chain(*step)] for step in training.run(2)[0]] == [
                [*itertools.chain(*step)] for step in steps[4:]
            ]


def test_what_can_not_be_is_refused_and_changes_nothing(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, cache = tmp_path / "left_out", tmp_path / "cache"
    with make(data / "a", cache) as loader, pytest.raises(OptionError, match=r"Shards\(leave_out=FILE\)"):
        loader.leave_out(["a"])
    with pytest.raises(OptionError, match="leave_out= is for training"):
        make(data / "a", cache, leave_out=file, train=False)
    with pytest.raises(OptionError, match="leave_out=3; expected the path"):
        make(data / "a", cache, leave_out=3)
    with pytest.raises(OptionError, match="can't be read"):
        make(data / "a", cache, leave_out=tmp_path)
    for line in ('{"key": 3}', '{"key": "a", "url": 3}', '{"k": "a"}', '{"key": "a"', "{}"):
        file.write_text(f"000\n\n{line}\n")
        with pytest.raises(OptionError, match=r"line 3 of .*; expected a key, or"):
            make(data / "a", cache, leave_out=file)
    file.unlink()
    with make(data / "a", cache, leave_out=file) as loader, caplog.at_level(logging.INFO, "streamload"):
        for keys in ([3], [("a", 3)], [None], [("a", "b", "c")]):
            with pytest.raises(OptionError, match="expected a list of keys"):
                loader.leave_out(keys)
        assert not file.exists()
        assert loader.leave_out("00001", why="as it is") == 0
        assert loader.leave_out(["00001"]) == 0
        assert [json.loads(line)["key"] for line in file.read_text().splitlines()] == ["00001"]
    assert caplog.messages == ["1 samples are left out from step 0 of the epoch on: as it is"]

"""Shards(facts=…): what keep= selects by, on any layout; forms, unknowns, hostile tables, the command."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamload
from streamload.batches.tokenize import adapt_tokenizer
from streamload.errors import FeatureMismatch
from streamload.facts import shard_facts
from streamload.facts.recipes import read_facts
from streamload.facts.tables import read_table
from streamload.shards.columns import Column, FactSample
from streamload.shards.facts import pack_values, unpack_values
from streamload.shards.samples import Entry
from streamload.testing.resume import Layout, assert_resumes_exactly
from streamload.testing.server import ShardServer
from streamload.testing.shards import ShardOptions, read_oracle, write_shards
from tests.support import flat
from tests.support.commands import run_forked

COUNTS = [40, 30, 50]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    write_shards(tmp_path / "data", COUNTS, seed=5, options=ShardOptions(without_text_every=11))
    with ShardServer(tmp_path / "data") as server:
        yield server


def urls(server: ShardServer) -> str:
    return f"{server.url}/{{00000..00002}}.tar"


def make(listed: Any, tmp_path: Path, **options: Any) -> streamload.Loader:
    defaults = {"batch_size": 4, "num_workers": 2, "with_keys": True, "cache_dir": tmp_path / "cache"}
    return flat.make_loader(listed, **{**defaults, "cache_size": "1GB", "text_key": None, **options})


def keys_of(loader: streamload.Loader) -> list[str]:
    return [key for *_, origin in loader for key in origin["__key__"]]


def samples_of(tmp_path: Path) -> list[tuple[str, dict[str, bytes]]]:
    return [sample for path in sorted((tmp_path / "data").glob("*.tar")) for sample in read_oracle(path)]


def index_of(members: dict[str, bytes]) -> int:
    return int(json.loads(members["json"])["index"])


def is_early(entry: Entry) -> bool:
    return entry.facts["index"] < 20


def is_likely(entry: Entry) -> bool:
    return entry.facts["p"] > 0.5


def is_long(entry: Entry) -> bool:
    return entry.facts["words"] >= 7


def words(sample: dict[str, Any]) -> float | None:
    return len(sample["txt"].split()) - int(sample["__key__"]) % 2 if "txt" in sample else None


def evaluated(server: ShardServer, tmp_path: Path, **options: Any) -> list[str]:
    with make(urls(server), tmp_path, train=False, **options) as loader:
        return keys_of(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_keep_reads_a_field_of_a_json_member(server: ShardServer, tmp_path: Path, workers: int):
    kept = evaluated(server, tmp_path, facts={"index": "json:index"}, keep=is_early, num_workers=workers)
    assert kept == [key for key, members in samples_of(tmp_path) if index_of(members) < 20]


def test_keep_reads_a_table_keyed_by_sample(server: ShardServer, tmp_path: Path):
    table = tmp_path / "scores.csv"
    rows = [f"{key},{index_of(members) / 40}" for key, members in samples_of(tmp_path)]
    table.write_text("\n".join(["key,p", *rows]))
    kept = evaluated(server, tmp_path, facts={"p": table}, keep=is_likely)
    assert kept == [key for key, members in samples_of(tmp_path) if index_of(members) > 20]


def test_keep_reads_a_parquet_file_keyed_by_sample(server: ShardServer, tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    samples = samples_of(tmp_path)
    columns = {"key": [key for key, _ in samples], "p": [index_of(members) / 40 for _, members in samples]}
    columns["p"][25] = None
    parquet.write_table(pyarrow.table(columns), tmp_path / "scores.parquet")
    kept = evaluated(server, tmp_path, facts={"p": str(tmp_path / "scores.parquet")}, keep=is_likely)
    assert kept == [key for key, members in samples[:25] + samples[26:] if index_of(members) > 20]
    parquet.write_table(pyarrow.table({"key": [1], "p": [0.5]}), tmp_path / "scores.parquet")
    with pytest.raises(streamload.errors.OptionError, match="has the key 1; expected strings"):
        make(urls(server), tmp_path, facts={"p": tmp_path / "scores.parquet"})
    (tmp_path / "scores.parquet").write_bytes(b"PAR1 or not")
    with pytest.raises(streamload.errors.OptionError, match="can't be read"):
        make(urls(server), tmp_path, facts={"p": tmp_path / "scores.parquet"})


def test_parquet_without_pyarrow_fails_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(streamload.errors.OptionError, match="needs pyarrow: pip install"):
        read_table(tmp_path / "scores.parquet", "p")


def test_keep_reads_what_a_function_returns_and_a_training_is_the_same_on_all_layouts(
    server: ShardServer, tmp_path: Path
):
    facts = {"words": words}
    expected = sorted(
        key for key, members in samples_of(tmp_path) if (words({"__key__": key, **_text(members)}) or 0) >= 7
    )
    assert 0 < len(expected) < sum(COUNTS)
    runs = []
    for workers in (0, 1, 3):
        options: dict[str, Any] = {"num_workers": workers, "cache_dir": tmp_path / f"cache{workers}"}
        with make(urls(server), tmp_path, facts=facts, keep=is_long, **options) as loader:
            runs.append(keys_of(loader))
    assert runs[0] == runs[1] == runs[2]
    assert set(runs[0]) <= set(expected)
    assert len(runs[0]) == len(expected) // 4 * 4


def _text(members: dict[str, bytes]) -> dict[str, bytes]:
    return {"txt": members["txt"]} if "txt" in members else {}


def test_a_run_that_is_kept_by_facts_resumes_exactly(server: ShardServer, tmp_path: Path):
    def made(**layout: Any) -> streamload.Loader:
        facts = {"index": "json:index", "words": words}
        return make(urls(server), tmp_path, facts=facts, keep=is_early, groups=1, output="dict", **layout)

    layouts = [Layout(1, 0), Layout(2, 1), Layout(4, 0)]
    cuts = assert_resumes_exactly(
        made, tmp_path / "caches", global_batch=4, first=Layout(1, 2), layouts=layouts, cuts=range(0, 15, 3)
    )
    assert cuts == 5


def test_a_state_names_facts_that_have_changed(server: ShardServer, tmp_path: Path):
    with make(urls(server), tmp_path, facts={"index": "json:index"}, keep=is_early) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with (
        make(urls(server), tmp_path, facts={"index": "json:shard"}, keep=is_early) as loader,
        pytest.raises(streamload.errors.StateMismatch, match="label_key, facts, repeat, listed uids and"),
    ):
        loader.load_state_dict(state)


def column(fact: Any, tokenizer: Any = None, text_key: str | None = "txt") -> Column:
    return read_facts({"it": fact}, "jpg", text_key, tokenizer)["it"]


def made_of(one: Column, *samples: dict[str, bytes]) -> list[float]:
    """What a column has for samples with these members."""
    found = []
    for number, members in enumerate(samples):
        places = tuple((name, 0, len(data)) for name, data in members.items())
        entry = Entry(number, f"k{number}", places, 0, 0, 0, None)
        assert set(one.needs(members)) <= set(members)
        found.append(FactSample(entry, {name: members[name] for name in one.needs(members)}))
    return unpack_values(pack_values(one.make(found), one.dtype), one.dtype).tolist()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"s": 0.25}', 0.25),
        (b'{"s": 7}', 7.0),
        (b'{"s": "0.25"}', 0.25),
        (b'{"s": true}', 1.0),
        (b'{"s": -1e300}', -1e300),
    ],
)
def test_a_json_field_is_a_number(text: bytes, value: float):
    assert made_of(column("json:s"), {"json": text}) == [value]


@pytest.mark.parametrize(
    "text",
    [
        b'{"s": null}', b'{"s": "much"}', b'{"s": [1]}', b'{"s": NaN}', b'{"s": Infinity}', b'{"s": 1e999}',
        b'{"s": 1' + b"0" * 400 + b"}", b'{"s": 1' + b"0" * 5000 + b"}", b'{"t": 1}',
        b"[1]", b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"s": "' + b"9" * (5 << 20) + b'"}',
    ],
    ids=range(15),
)  # fmt: skip
def test_a_json_field_that_is_no_number_is_unknown(text: bytes):
    found = made_of(column("json:s"), {"json": text}, {"txt": b"no json"}, {"json": b'{"s": 2}'})
    np.testing.assert_array_equal(found, [math.nan, math.nan, 2.0])


def spelled(captions: list[str]) -> list[list[int]]:
    return [[*map(ord, caption[:8])] + [0] * (8 - len(caption)) for caption in captions]


def test_tokens_are_counted_without_padding():
    samples = [{"txt": text} for text in (b"a cat", b"", b"a very long caption", b"\xff")]
    np.testing.assert_array_equal(made_of(column("tokens", spelled), *samples), [5, 0, 8, math.nan])
    assert made_of(column("tokens", spelled, "json:c"), {"json": b'{"c": "abc"}'}) == [3]


def test_an_end_that_is_also_the_padding_is_counted_once():
    def ended(captions: list[str]) -> list[list[int]]:
        return [([1, *map(ord, text[:6])] + [9] * 8)[:8] for text in captions]

    assert adapt_tokenizer(ended).lengths(["", "ab", "abcdef", "abcdefgh"]).tolist() == [2, 4, 8, 8]


def test_tokens_by_a_tokenizer_of_transformers_are_those_of_its_mask():
    tokenizer = of_transformers(8)
    assert made_of(column("tokens", tokenizer), {"txt": b"a cat"}, {"txt": b"a " * 50}) == [2, 8]
    digest = column("tokens", tokenizer).digest
    tokenizer(["a", "a cat"], padding=True, truncation=True, max_length=3)  # leaves settings behind
    assert column("tokens", tokenizer).digest == digest == column("tokens", of_transformers(8)).digest
    assert column("tokens", of_transformers(9)).digest != digest
    assert column("tokens", of_transformers(8, "dog")).digest != digest
    assert column("tokens", tokenizer, "json:c").digest != digest


def of_transformers(length: int, word: str = "cat") -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {name: number for number, name in enumerate(["[PAD]", "[UNK]", "a", word])}
    model = Tokenizer(models.WordLevel(words, "[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]", model_max_length=length
    )


def test_tokens_by_a_tokenizer_that_draws_are_refused():
    def drawn(captions: list[str]) -> Any:
        return np.random.randint(1, 9, (len(captions), 4))

    with pytest.raises(streamload.errors.OptionError, match="draws random numbers"):
        column("tokens", drawn)


def test_functions_of_other_code_or_version_are_other_columns():
    def one(sample: dict[str, Any]) -> float:
        return 1.0

    def two(sample: dict[str, Any]) -> float:
        return 2.0

    digests = [column(fact).digest for fact in (one, two, (one, "1"), (one, "2"), "json:one", "json:two")]
    assert len(set(digests)) == len(digests)
    assert column((two, "1")).digest == column((one, "1")).digest
    assert column(one).digest == column(one).digest


def test_two_functions_under_one_version_are_refused_and_one_may_have_two_names():
    def one(sample: dict[str, Any]) -> float:
        return 1.0

    def two(sample: dict[str, Any]) -> float:
        return 2.0

    with pytest.raises(
        streamload.errors.OptionError, match="'a' and 'b' are other functions under one version"
    ):
        read_facts({"a": (one, "1"), "b": (two, "1")}, "jpg", "txt", None)
    for facts in ({"a": (one, "1"), "b": (two, "2")}, {"a": (one, "1"), "b": (one, "1")}):
        assert read_facts(facts, "jpg", "txt", None).keys() == {"image_bytes", "a", "b"}


def test_a_function_gets_members_without_images_and_may_not_know():
    def count(sample: dict[str, Any]) -> float | None:
        assert sample.pop("__key__").startswith("k")
        assert set(sample.pop("__images__")) <= set(image)
        return {1: None, 2: math.inf}.get(len(sample), 10**400 if len(sample) == 3 else 1.0)

    image = {"jpg": b"", "seg.png": b""}
    samples = [image, {**image, "txt": b""}, {"a": b"", "b": b""}, {"a": b"", "b": b"", "c": b""}]
    np.testing.assert_array_equal(made_of(column(count), *samples), [1.0, math.nan, math.nan, math.nan])


def test_a_function_of_several_facts_returns_a_number_for_each():
    returned = iter([(1, None), None, [2.5, math.inf], np.array([3, 4]), (5, 10**400), (1, 2, 3)])

    def several(sample: dict[str, Any]) -> Any:
        return next(returned)

    made = read_facts({("a", "b"): (several, "1")}, "jpg", "txt", None)
    assert made.keys() == {"image_bytes", "a", "b"}
    stored = made["a"].stored
    assert stored is made["b"].stored
    assert made["a"].digest != made["b"].digest
    packed = pack_values(stored.make([FactSample(Entry(0, "k", (), 0, 0, 0, None), {})] * 5), stored.dtype)
    nan = math.nan
    expected = [[1, nan], [nan, nan], [2.5, nan], [3, 4], [nan, nan]]
    np.testing.assert_array_equal(unpack_values(packed, stored.dtype), expected)
    with pytest.raises(streamload.errors.OptionError, match="returned 3 numbers, not 2") as caught:
        stored.make([FactSample(Entry(0, "one", (), 0, 0, 0, None), {})])
    assert "for sample 'one'" in "".join(caught.value.__notes__)


def test_facts_of_one_name_function_and_version_have_digests_of_their_own():
    one, two = ({name: fact} for name, fact in ((("a", "b"), (words, "1")), (("b", "a"), (words, "1"))))
    first, second = (read_facts(facts, "jpg", "txt", None) for facts in (one, two))
    digests = [first["a"].digest, first["b"].digest, column((words, "1")).digest]
    digests.append(read_facts({("a",): (words, "1")}, "jpg", "txt", None)["a"].digest)
    digests.append(read_facts({("a", "b", "c"): (words, "1")}, "jpg", "txt", None)["a"].digest)
    assert len(set(digests)) == len(digests)
    assert (first["a"].digest, first["b"].digest) == (second["b"].digest, second["a"].digest)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({("a", "width"): words}, "expected a name other than width"),
        ({("a", 3): words}, "expected a name other than width"),
        ({("a", "a"): words}, "'a' has two facts"),
        ({"a": "json:a", ("b", "a"): words}, "'a' has two facts"),
        ({("a", "b"): "json:a"}, "a function under several names"),
        ({(): words}, "expected a name other than width"),
        ({("a", "b"): (words, "1"), ("c", "d"): (len, "1")}, "other functions under one version"),
    ],
)
def test_what_is_no_name_of_several_facts_fails(facts: Any, says: str):
    with pytest.raises(streamload.errors.OptionError, match=says):
        read_facts(facts, "jpg", "txt", None)


def fail(sample: dict[str, Any]) -> float:
    raise ZeroDivisionError


def test_an_error_of_a_function_names_the_sample(server: ShardServer, tmp_path: Path):
    with make(urls(server), tmp_path, facts={"f": fail}, keep=is_early, num_workers=0) as loader:
        with pytest.raises(ZeroDivisionError) as caught:
            keys_of(loader)
        assert "for sample '0000" in "".join(caught.value.__notes__)


def test_a_table_with_hostile_rows(tmp_path: Path):
    table = tmp_path / "t.csv"
    table.write_bytes(
        "﻿other,key,p\n1,a,0.5\n1,b,nan\n1,c,1e999\n1,d,many\n1,e,x\n\n1,f,1\n1,f,1\n1,g,1\n1,g,2\n"
        "1,h,-0.25\n1,i,\n1,j,3\n1,j,nan\n".encode()
        + b"1,\xff,8\n"
    )
    one = column(f"{table}:p")
    keys = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "\udcff", "missing"]
    entries = [Entry(0, key, (("txt", 0, 0),), 0, 0, 0, None) for key in keys]
    nan = math.nan
    expected = [0.5, nan, nan, nan, nan, 1, nan, -0.25, nan, nan, 8, nan]
    np.testing.assert_array_equal(one.make([FactSample(entry, {}) for entry in entries]), expected)
    table.write_text("key,p\n")
    np.testing.assert_array_equal(column(f"{table}:p").make([FactSample(entries[0], {})]), [nan])
    assert column(f"{table}:p").digest != one.digest


@pytest.mark.parametrize(
    ("fact", "says"),
    [
        ("txt", "json:<field>"),
        ("clip score", "json:<field>"),
        (0.5, "a function"),
        ("/no/such.csv", "can't be read"),
        ("tokens", "needs a tokenizer"),
        (("tokens", "1"), "a function"),
    ],
)
def test_what_is_no_fact_fails(fact: Any, says: str):
    with pytest.raises(streamload.errors.OptionError, match=says):
        column(fact)


def test_a_table_without_the_column_fails_with_its_columns(tmp_path: Path):
    (tmp_path / "t.csv").write_text("id,score\n1,2\n")
    with pytest.raises(streamload.errors.OptionError, match=r"file has no column key or .*'id, score'"):
        column(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text("key,score\na,2\nb\n")
    with pytest.raises(streamload.errors.OptionError, match="line 3 has 1 fields; expected 2"):
        column(f"{tmp_path}/t.csv:score")


def test_a_built_in_name_is_taken(server: ShardServer, tmp_path: Path):
    with pytest.raises(streamload.errors.OptionError, match="expected a name other than width, height"):
        make(urls(server), tmp_path, facts={"width": "json:width"})


@pytest.mark.deep
def test_warm_makes_the_facts_that_a_training_finds(server: ShardServer, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "def tokenize(captions):\n    return [[len(c)] * 2 for c in captions]\n"
    )
    command = [
        sys.executable,
        "-m",
        "streamload",
        "warm",
        urls(server),
        "--cache-dir",
        str(tmp_path / "cache"),
    ]
    facts = ["--facts", "index=json:index", "--facts", "tokens", "--tokenizer", "mine:tokenize", "--json"]
    done = subprocess.run(
        [*command, "--cache-size", "1GB", *facts], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["shards_with_facts"] == len(COUNTS)
    found = sorted((tmp_path / "cache").glob("shards/*/facts.*"))
    assert len(found) == 3 * len(COUNTS)  # and the sizes of images
    before = [(file.stat().st_mtime_ns, file.stat().st_size) for file in found]
    evaluated(server, tmp_path, facts={"i": "json:index"}, keep=lambda entry: entry.facts["i"] < 5)
    assert [(file.stat().st_mtime_ns, file.stat().st_size) for file in found] == before


def test_facts_of_prepared_shards_are_those_of_the_original(tmp_path: Path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for key, members in enumerate([{"jpg": _jpeg(), "txt": b"a cat", "json": b'{"index": 3}'}] * 8):
            for extension, data in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    options: dict[str, Any] = {"facts": {"index": "json:index"}, "keep": is_early, "train": False}
    with make(str(tmp_path / "a.tar"), tmp_path, **options) as loader:
        plain = keys_of(loader)
    command = ["warm", str(tmp_path / "a.tar"), "--prepare", "raw"]
    run_forked(
        [*command, "--cache-dir", str(tmp_path / "prepared"), "--cache-size", "1GB"]
    ).check_returncode()
    options |= {"prepare": "raw", "cache_dir": tmp_path / "prepared"}
    with make(str(tmp_path / "a.tar"), tmp_path, **options) as loader:
        assert keys_of(loader) == plain == [str(key) for key in range(8)]


def _jpeg() -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(buffer, "JPEG")
    return buffer.getvalue()


def logged(sample: dict[str, Any]) -> float:
    with Path(os.environ["FACTS_MADE"]).open("a") as log:
        log.write(f"{sample['__key__']}\n")
    return 1.0


def is_any(entry: Entry) -> bool:
    return entry.facts["logged"] == 1


def test_workers_make_each_fact_once_though_shards_are_published_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FACTS_MADE", str(tmp_path / "made"))
    write_shards(tmp_path / "small", [60] * 24, seed=5)
    with ShardServer(tmp_path / "small") as server:
        listed = f"{server.url}/{{00000..00023}}.tar"
        facts = {"logged": (logged, "1")}
        with make(listed, tmp_path, facts=facts, keep=is_any, batch_size=8, num_workers=4) as loader:
            assert len(keys_of(loader)) == 24 * 60
    made = (tmp_path / "made").read_text().split()
    assert len(made) == len(set(made)) == 24 * 60


def by_a_variable(sample: dict[str, Any]) -> float:
    return float(os.environ["FACTOR_OF_THE_TEST"])


def has_weight(entry: Entry) -> bool:
    return entry.facts["weight"] != 0


def test_stored_facts_that_are_not_what_a_function_returns_now_end_the_run(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FACTOR_OF_THE_TEST", "2")

    def kept(fact: Any = by_a_variable) -> int:
        shard_facts._checked.clear()  # as in another process
        return len(evaluated(server, tmp_path, facts={"weight": fact}, keep=has_weight, num_workers=0))

    assert kept() == kept() == sum(COUNTS)
    monkeypatch.setenv("FACTOR_OF_THE_TEST", "2.0000001")  # the same in float32
    assert kept() == sum(COUNTS)
    for factor in ("2.001", "-2"):
        monkeypatch.setenv("FACTOR_OF_THE_TEST", factor)
        with pytest.raises(
            FeatureMismatch, match=rf"fact 'weight' .* as 2, and is {factor} now.*\(function, \"1\"\)"
        ):
            kept()
    assert kept((by_a_variable, "2")) == sum(COUNTS)  # the way on


def test_one_of_several_stored_facts_that_differs_now_ends_the_run(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FACTOR_OF_THE_TEST", "2")

    def both(sample: dict[str, Any]) -> tuple[int, float]:
        return len(sample["__key__"]), by_a_variable(sample)

    def kept() -> int:
        shard_facts._checked.clear()  # as in another process
        facts = {("length", "weight"): both}
        return len(evaluated(server, tmp_path, facts=facts, keep=has_weight, num_workers=0))

    assert kept() == kept() == sum(COUNTS)
    monkeypatch.setenv("FACTOR_OF_THE_TEST", "-2")
    with pytest.raises(FeatureMismatch, match=r"fact \('length', 'weight'\) .* as 2, and is -2 now"):
        kept()


def after_its_length(loader: streamload.Loader) -> list[Any]:
    """As tqdm and trainers read a loader: a length that isn't known is no error."""
    with contextlib.suppress(TypeError):
        len(loader)
    return list(loader)


@pytest.mark.parametrize("begin", [list, after_its_length])
def test_a_stale_fact_is_refused_each_time_however_a_loop_begins(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: Any
) -> None:
    """What swallows the error, such as the length that list() asks for, leaves it to the next that looks."""
    monkeypatch.setenv("FACTOR_OF_THE_TEST", "2")
    options = {"facts": {"weight": by_a_variable}, "keep": has_weight, "num_workers": 0, "train": False}
    with make(urls(server), tmp_path, **options) as loader:
        assert len(keys_of(loader)) == sum(COUNTS)
    monkeypatch.setenv("FACTOR_OF_THE_TEST", "-2")
    shard_facts._checked.clear()  # as in another process
    for _ in range(2):
        with make(urls(server), tmp_path, **options) as loader, pytest.raises(FeatureMismatch):
            begin(loader)

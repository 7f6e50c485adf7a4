"""`streamload pack`: each source becomes shards that a loader reads, and what can't be packed is said."""

import hashlib
import io
import json
import sys
import tarfile
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

import streamload
from streamload.cli import main
from streamload.integrations.conversations.messages import image_members, read_conversation
from streamload.testing.shards import ShardOptions, read_oracle, write_shards

COLOURS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
OPTIONS = {"train": False, "num_workers": 0, "preprocess": None}


def image(number, form="JPEG"):
    """An image whose size says its number."""
    buffer = io.BytesIO()
    Image.new("RGB", (8 + number, 8), (number, 0, 0)).save(buffer, form)
    return buffer.getvalue()


@pytest.fixture
def pack(capsys, monkeypatch):
    """Run the command in this process; its result, or its one line of error."""

    def run(source, target, *options):
        arguments = ["streamload", "pack", str(source), str(target), "--json", *map(str, options)]
        monkeypatch.setattr(sys, "argv", arguments)
        try:
            main()
        except SystemExit as exc:
            if exc.code:
                return capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


def packed(target):
    """The samples of all shards, as tarfile reads them; sizes.json counts them."""
    sizes = json.loads((target / "sizes.json").read_text())
    samples = {name: read_oracle(target / name) for name in sizes}
    assert {name: len(own) for name, own in samples.items()} == sizes
    assert sorted(path.name for path in target.glob("*.tar")) == sorted(sizes)
    assert not [path.name for path in target.iterdir() if path.name.startswith(".")]
    every = [sample for own in samples.values() for sample in own]
    assert len({key for key, _ in every}) == len(every)
    return dict(every)


def loaded(target, shards=None, **options):
    """Key → the other values of each sample that a loader gives."""
    batches = streamload.Batches(with_keys=True)
    found = {}
    with streamload.make_loader(
        str(target),
        shards=shards or streamload.Shards(),
        batch_size=4,
        batches=batches,
        **{**OPTIONS, **options},
    ) as loader:
        for *values, names in loader:
            found |= {key: [value[row] for value in values] for row, key in enumerate(names["__key__"])}
    return found


def parquet_rows(count, form="JPEG"):
    return [
        {"image": {"bytes": image(number, form), "path": f"{number}.x"}, "caption": f"caption {number}"}
        for number in range(count)
    ]


@pytest.mark.parametrize(("form", "is_struct"), [("JPEG", True), ("PNG", False), ("WEBP", True)])
def test_parquet_with_images_in_it(pack, tmp_path, form, is_struct):
    rows = parquet_rows(20, form)
    if not is_struct:
        rows = [{**row, "image": row["image"]["bytes"]} for row in rows]
    bad = [
        {**rows[0], "caption": " "},
        {**rows[0], "image": None},
        {**rows[0], "image": {"bytes": b"GIF89a", "path": None} if is_struct else b"GIF89a"},
    ]
    table = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist([*rows, *bad, rows[1]]), table, row_group_size=7)
    report = pack(table, tmp_path / "out", "--samples-per-shard", 10)
    assert report["left_out"] == {
        "without a caption": 1,
        "whose image is not there": 1,
        "whose image is not one of .jpg, .jpeg, .png, .webp": 1,
    }
    found = packed(tmp_path / "out")
    extension = COLOURS[form]
    assert found == {
        f"{number:09d}": {extension: image(own, form), "txt": f"caption {own}".encode()}
        for number, own in [*enumerate(range(20)), (23, 1)]
    }
    for key, (_, text) in loaded(tmp_path / "out").items():
        assert text == found[key]["txt"].decode()


def test_columns_by_name_and_types_that_json_has_not(pack, tmp_path):
    rows = [
        {
            "jpg": image(number), "text": [f"a {number}", ""], "sku": f"x.{number // 2}", "score": number / 2,
            "day": date(2026, 1, 1 + number), "nothing": float("nan"),
        }
        for number in range(4)
    ]  # fmt: skip
    rows.append({**rows[0], "sku": "__no__/a"})
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    names = ("--image-column", "jpg", "--caption-column", "text", "--label-column", "score")
    kept = ("--key-column", "sku", "--keep-columns", "day,nothing", "--no-shuffle")
    report = pack(tmp_path / "a.parquet", tmp_path / "out", *names, *kept)
    assert report["left_out"] == {"whose key is none that a loader reads": 1}
    found = packed(tmp_path / "out")
    assert [*found] == ["x_0", "x_0~2", "x_1", "x_1~2"]
    assert [json.loads(members["json"]) for members in found.values()] == [
        {"day": f"2026-01-0{1 + number}", "nothing": None, "text": [f"a {number}", ""]} for number in range(4)
    ]
    shards = streamload.Shards(text_key="json:text[*]", label_key="cls", label_type="float")
    values = loaded(tmp_path / "out", shards)
    assert {key: (text, float(label)) for key, (_, text, label) in values.items()} == {
        key: (f"a {number}", number / 2) for number, key in enumerate(found)
    }


def arrow_folder(folder, rows, schema=None, files=2):
    """A folder as `datasets.Dataset.save_to_disk` writes it."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows, schema)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        part = table.slice(number * len(rows) // files, len(rows) // files)
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(part, max_chunksize=3)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def test_a_folder_of_the_datasets_library_with_labels(pack, tmp_path):
    names = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema(
        [("image", struct), ("label", pa.int64())], metadata={"huggingface": json.dumps(names)}
    )
    rows = [{"image": {"bytes": image(n), "path": None}, "label": n % 2} for n in range(10)]
    arrow_folder(tmp_path / "set" / "train", [*rows[:9], {**rows[9], "label": None}], schema)
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert "has the splits train: give the folder of one" in pack(tmp_path / "set", tmp_path / "out")
    report = pack(tmp_path / "set" / "train", tmp_path / "out", "--samples-per-shard", 4)
    assert report["left_out"] == {"without a label": 1}
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == ["cat", "dog"]
    found = packed(tmp_path / "out")
    assert found == {f"{n:09d}": {"jpg": image(n), "cls": str(n % 2).encode()} for n in range(9)}
    labels = loaded(tmp_path / "out", streamload.Shards(text_key=None, label_key="cls"))
    assert {key: int(label) for key, (_, label) in labels.items()} == {f"{n:09d}": n % 2 for n in range(9)}


def test_a_folder_of_parquet_is_one_split(pack, tmp_path):
    for split, count in (("train", 5), ("test", 2)):
        for part in range(2):
            path = tmp_path / "hub" / "data" / f"{split}-0000{part}-of-00002.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            parquet.write_table(pa.Table.from_pylist(parquet_rows(count)), path)
    said = pack(tmp_path / "hub", tmp_path / "out")
    assert "several splits" in said
    assert "test-00001-of-00002" in said
    report = pack(tmp_path / "hub" / "data" / "train-*.parquet", tmp_path / "out")
    assert sum(report["shards"].values()) == 10
    assert sorted(packed(tmp_path / "out")) == [f"{number:09d}" for number in range(10)]


def test_conversations_of_llava(pack, tmp_path):
    (tmp_path / "images" / "coco").mkdir(parents=True)
    for number in range(12):
        (tmp_path / "images" / "coco" / f"{number}.jpg").write_bytes(image(number))
    turn, answer = {"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "That."}
    rows = [
        {"id": "one", "image": "coco/0.jpg", "conversations": [turn, answer]},
        {"id": "again", "image": "coco/0.jpg", "conversations": [turn, answer, {**turn, "value": "?"}]},
        {"id": "text", "conversations": [turn | {"value": "Why?"}, answer]},
        {
            "id": "many", "image": [f"coco/{n}.jpg" for n in range(11, -1, -1)],
            "conversations": [turn | {"value": "<image>" * 12}, answer],
        },
        {"id": "gone", "image": "coco/99.jpg", "conversations": [turn, answer]},
    ]  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for kind in ("json", "jsonl"):
        options = ("--image-folder", tmp_path / "images", "--no-shuffle")
        report = pack(tmp_path / f"a.{kind}", tmp_path / kind, *options)
        assert report["left_out"] == {"whose image is not there": 1}
        found = packed(tmp_path / kind)
        assert [*found] == ["coco/0", "coco/0~2", "000000002", "coco/11"]
        order = []
        for (key, members), row in zip(found.items(), rows[:4], strict=True):
            stored = json.loads(members["json"])
            assert {**stored, "image": row.get("image")} == {**row, "image": row.get("image")}
            images = read_conversation(stored, key, image_members(members)).images
            order.append([Image.open(io.BytesIO(members[name])).width - 8 for name in images])
        assert order == [[0], [0], [], [*range(11, -1, -1)]]


def test_the_command_packs_what_conversations_train_on(pack, tmp_path):
    rows = [
        {"images": [{"bytes": image(n), "path": "a.jpg"}, {"bytes": image(n + 1), "path": "a.jpg"}][: n % 3],
         "messages": [{"role": "user", "content": "<image>" * (n % 3) + "?"}]}
        for n in range(6)
    ]  # fmt: skip
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert pack(tmp_path / "a.parquet", tmp_path / "out")["left_out"] == {}
    shards = streamload.Shards(image_key=None, text_key=None)

    def example(sample):
        members = [name for name in sample if not name.startswith("__")]
        conversation = read_conversation(
            json.loads(sample["json"]), sample["__key__"], image_members(dict.fromkeys(members))
        )
        widths = [Image.open(io.BytesIO(sample[name])).width - 8 for name in conversation.images]
        return {"key": sample["__key__"], "widths": widths}

    workers = streamload.Workers(map_sample=example, collate=lambda samples: {"all": samples})
    with streamload.make_loader(
        str(tmp_path / "out"), shards=shards, workers=workers, batch_size=2, train=False, num_workers=0
    ) as loader:
        widths = {each["key"]: each["widths"] for batch in loader for each in batch["all"]}
    assert widths == {f"{n:09d}": [n, n + 1][: n % 3] for n in range(6)}


def test_lists_of_captions_are_json_that_a_loader_draws_from(pack, tmp_path):
    (tmp_path / "a.jpg").write_bytes(image(1))
    rows = [
        {"image": "a.jpg", "caption": ["one", "two", None]},
        {"image": "a.jpg", "caption": []},
        {"image": "a.jpg", "caption": "alone"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert pack(tmp_path / "a.jsonl", tmp_path / "out")["left_out"] == {"without a caption": 1}
    found = packed(tmp_path / "out")
    assert json.loads(found["a"]["json"]) == {"caption": ["one", "two", None]}
    texts = loaded(tmp_path / "out", streamload.Shards(text_key="json:caption[*];txt"))
    assert texts["a"][1] in {"one", "two"}
    assert texts["a~2"][1] == "alone"


def test_class_folders_are_labels(pack, tmp_path):
    for label, count in (("dog", 3), ("cat", 2)):
        for number in range(count):
            path = tmp_path / "set" / label / "deep" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image(number))
    report = pack(tmp_path / "set", tmp_path / "out")
    assert report == {"target": str(tmp_path / "out"), "shards": {"00000.tar": 5}, "left_out": {}}
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == ["cat", "dog"]
    labels = loaded(tmp_path / "out", streamload.Shards(text_key=None, label_key="cls"))
    assert packed(tmp_path / "out").keys() == labels.keys()
    assert all(int(label) == (key.startswith("dog")) for key, (_, label) in labels.items())
    (tmp_path / "set" / "cat" / "deep" / "0.txt").write_text("a cat")  # captions, then
    assert pack(tmp_path / "set", tmp_path / "captions")["left_out"] == {"without a caption": 4}


def test_tars_are_cut_anew(pack, tmp_path):
    paths = write_shards(tmp_path / "set", [5, 1, 9], options=ShardOptions(folder="v1.0/"))
    before = dict(sample for path in paths for sample in read_oracle(path))
    link = tarfile.TarInfo("lost.jpg")
    link.type, link.linkname = tarfile.SYMTYPE, "elsewhere.jpg"
    with tarfile.open(paths[0], "a") as tar:
        tar.addfile(link)
        text = tarfile.TarInfo("lost.txt")
        text.size = 1
        tar.addfile(text, io.BytesIO(b"x"))
    report = pack(tmp_path / "set", tmp_path / "out", "--samples-per-shard", 4, "--prefix", "a%d-")
    assert report["shards"] == {
        "a%d-00000.tar": 4,
        "a%d-00001.tar": 4,
        "a%d-00002.tar": 4,
        "a%d-00003.tar": 3,
    }
    assert report["left_out"] == {"with links to what is not in the tar, or sparse files": 1}
    assert packed(tmp_path / "out") == before
    pack(paths[2], tmp_path / "one", "--no-shuffle")
    assert [*packed(tmp_path / "one").items()] == read_oracle(paths[2])


def test_keys_stay_apart_and_can_be_read(pack, tmp_path):
    """Also those that look as if they had been told apart, and those that no tar can hold."""
    keys = ["a", "a", "a~2", "a~2", "b\0c", "d" * 70_000, "e\u00e9"]
    rows = [{"image": image(n), "caption": "x", "key": key} for n, key in enumerate(keys)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    options = ("--key-column", "key", "--no-shuffle", "--image-folder", tmp_path)
    report = pack(tmp_path / "a.parquet", tmp_path / "out", *options)
    assert report["left_out"] == {"whose key is none that a loader reads": 2}
    assert {key: members["jpg"] for key, members in packed(tmp_path / "out").items()} == {
        key: image(n) for key, n in {"a": 0, "a~2": 1, "a~2~2": 2, "a~2~3": 3, "e\u00e9": 6}.items()
    }
    (tmp_path / "images").mkdir()
    (tmp_path / "tables").mkdir()
    (tmp_path / "images" / "a.jpg").write_bytes(image(1))
    (tmp_path / "images" / "a~2.jpg").write_bytes(image(2))
    names = ["a", "a", "a~2"]
    rows = [{"image": f"../images/{name}.jpg", "caption": "x"} for name in names]
    (tmp_path / "tables" / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pack(tmp_path / "tables" / "a.jsonl", tmp_path / "table", "--no-shuffle")
    assert [*packed(tmp_path / "table")] == ["images/a", "images/a~2", "images/a~2~2"]


def test_linked_folders_are_followed_and_what_is_no_file_is_left_out(pack, tmp_path):
    for place in ("set/cat", "far", "set/.cache"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "1.jpg").write_bytes(image(1))
    (tmp_path / "set" / "dog").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "up").symlink_to(tmp_path / "set" / "dog")
    (tmp_path / "set" / "cat" / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (tmp_path / "set" / "cat" / "._1.jpg").write_bytes(b"attributes of macOS")
    report = pack(tmp_path / "set", tmp_path / "out")
    assert report["left_out"] == {"whose image is not there": 1}
    assert {key: members["cls"] for key, members in packed(tmp_path / "out").items()} == {
        "cat/1": b"0",
        "dog/1": b"1",
    }


@pytest.mark.parametrize(
    "about", ['{"info": {"features": {"label": [{"names": 1}]}}}', '{"info": null}', "x", "[]"]
)
def test_metadata_of_others_is_no_error(pack, tmp_path, about):
    table = pa.Table.from_pylist(parquet_rows(1)).replace_schema_metadata({"huggingface": about})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert pack(tmp_path / "a.parquet", tmp_path / "out")["left_out"] == {}


def test_a_pattern_is_taken_at_its_word(pack, tmp_path):
    for part in range(2):  # as Spark names them
        path = tmp_path / f"part-0000{part}-1b2c-c000.snappy.parquet"
        parquet.write_table(pa.Table.from_pylist(parquet_rows(2)), path)
    assert "a pattern in quotes" in pack(tmp_path, tmp_path / "out")
    assert pack(tmp_path / "*.parquet", tmp_path / "out")["shards"] == {"00000.tar": 4}


def test_a_prefix_is_the_beginning_of_a_name(pack, tmp_path):
    for prefix in ("a/b", ".a"):
        assert "--prefix" in pack(tmp_path, tmp_path / "out", "--prefix", prefix)


def test_json_that_is_too_deep_is_said(pack, tmp_path):
    (tmp_path / "a.jsonl").write_text("[" * 100_000)
    assert "has a line that is not JSON" in pack(tmp_path / "a.jsonl", tmp_path / "out")


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_urls_are_refused_with_the_tool_for_them(pack, tmp_path, kind):
    row = {"image": "HTTPS://host/a.jpg", "caption": "a"}
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    else:
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
    assert "download them with img2dataset" in pack(tmp_path / f"a.{kind}", tmp_path / "out")
    assert not [*(tmp_path / "out").glob("*")]


@pytest.mark.parametrize(
    ("row", "options", "says"),
    [
        ({"image": b"x"}, [], "row 1 has no 'caption', only 'image'"),
        ({"img": b"x", "caption": ""}, [], "row 1 has no 'image', only 'img', 'caption'"),
        ({"image": 7, "caption": "a"}, [], "'image' is a int; expected a path or the bytes of an image"),
        ({"image": image(0), "label": "cat"}, [], "the column 'label' is 'cat'; expected a number"),
        ({"image": image(0), "caption": "a"}, ["--keep-columns", "image"], None),
        (
            {"image": image(0), "caption": "a", "raw": b"x"},
            ["--keep-columns", "*"],
            "a kept column has bytes",
        ),
    ],
)
def test_what_a_row_can_not_be_is_said(pack, tmp_path, row, options, says):
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    report = pack(tmp_path / "a.parquet", tmp_path / "out", *options)
    assert report["left_out"] == {} if says is None else says in report


def test_damaged_files_are_named(pack, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    assert "a.parquet is neither Parquet" in pack(tmp_path / "a.parquet", tmp_path / "out")
    (tmp_path / "a.arrow").write_bytes(b"no")
    assert "a.arrow is neither Parquet nor a stream of Arrow" in pack(tmp_path / "a.arrow", tmp_path / "out")
    (tmp_path / "a.json").write_text('{"image": 1}, 2')
    assert "not JSON" in pack(tmp_path / "a.json", tmp_path / "out")
    (tmp_path / "a.json").write_text("[1]")
    assert "not a JSON object" in pack(tmp_path / "a.json", tmp_path / "out")


def digests(target):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in target.iterdir()}


@pytest.mark.parametrize("shuffle", ["--shuffle", "--no-shuffle"])
def test_shards_are_the_same_for_any_number_of_jobs(pack, tmp_path, shuffle):
    table = pa.Table.from_pylist(parquet_rows(60))
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=23)  # larger than a shard
    for jobs in (1, 2):
        pack(tmp_path / "a.parquet", tmp_path / f"{jobs}", "--samples-per-shard", 10, "--jobs", jobs, shuffle)
    assert digests(tmp_path / "1") == digests(tmp_path / "2")
    keys = [*packed(tmp_path / "1")]
    assert sorted(keys) == [f"{number:09d}" for number in range(60)]
    assert (keys == sorted(keys)) is (shuffle == "--no-shuffle")
    if shuffle == "--shuffle":  # of a group's rows each shard has some from all over it
        spread = [int(key) // 23 for key in keys[:8]], [int(key) % 23 for key in keys[:8]]
        assert max(spread[1]) - min(spread[1]) > 10


class Hub(BaseHTTPRequestHandler):
    """A server that speaks the Hub's API for one data set, whose files are in a folder."""

    folder: Path
    token = "hf_x"

    def log_message(self, *_):
        pass

    def answer(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def about(self, name):
        path = self.folder / name
        kind = "directory" if path.is_dir() else "file"
        size = 0 if path.is_dir() else path.stat().st_size
        return {"type": kind, "path": name, "size": size, "oid": "0" * 40}

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        fields = dict(part.split("=") for part in unquote(self.rfile.read(length).decode()).split("&"))
        names = [fields["paths"]] if (self.folder / fields["paths"]).exists() else []
        self.answer([self.about(name) for name in names])

    def do_GET(self):
        url = urlsplit(self.path)
        path = unquote(url.path)
        if self.headers.get("Authorization") != f"Bearer {self.token}":
            self.answer({"error": "denied"}, 401)
        elif "/resolve/" in path:
            self.file(self.folder / path.partition("/resolve/")[2].partition("/")[2])
        elif "/tree/" in path:
            place = self.folder / path.partition("/tree/")[2].partition("/")[2]
            every = place.rglob("*") if "recursive=true" in url.query else place.iterdir()
            self.answer([self.about(str(each.relative_to(self.folder))) for each in sorted(every)])
        else:
            self.answer({"id": "me/data", "sha": "0" * 40, "_id": "0", "private": False, "siblings": []})

    do_HEAD = do_GET  # noqa: N815

    def file(self, path):
        data = path.read_bytes()
        start, stop = 0, len(data)
        if "Range" in self.headers:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            start, stop = int(first), min(stop, int(last) + 1 if last else stop)
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("ETag", '"x"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[start:stop])


def test_a_data_set_of_the_hub(pack, tmp_path):
    (tmp_path / "hub" / "data").mkdir(parents=True)
    (tmp_path / "hub" / "docs").mkdir()
    (tmp_path / "hub" / "docs" / "README.md").write_text("a set")
    for part in range(2):
        path = tmp_path / "hub" / "data" / f"train-0000{part}-of-00002.parquet"
        parquet.write_table(pa.Table.from_pylist(parquet_rows(6)), path, row_group_size=4)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OurHub", (Hub,), {"folder": tmp_path / "hub"}))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        options = {"endpoint": f"http://127.0.0.1:{server.server_port}", "token": Hub.token}
        far = ("--storage-options", json.dumps(options), "--samples-per-shard", 4)
        for number, path in enumerate(["", "/data/train-*.parquet"]):
            url = f"hf://datasets/me/data{path}"
            assert pack(url, tmp_path / f"{number}", *far, "--jobs", 1)["left_out"] == {}
        assert "nor a URL of Parquet files" in pack("hf://datasets/me/data/docs", tmp_path / "out", *far)
    finally:
        server.shutdown()
        server.server_close()
    assert packed(tmp_path / "0") == packed(tmp_path / "1")
    assert packed(tmp_path / "0") == {
        f"{number:09d}": {"jpg": image(number % 6), "txt": f"caption {number % 6}".encode()}
        for number in range(12)
    }

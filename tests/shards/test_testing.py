"""The shards that tests are made of."""

import io
import json

import xxhash
from PIL import Image

from streamload.testing.shards import ShardOptions, read_oracle, write_shards


def test_equal_arguments_give_equal_bytes(tmp_path):
    one, other = (write_shards(tmp_path / name, [3, 5], seed=7) for name in "ab")
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]
    (changed, _) = write_shards(tmp_path / "c", [3, 5], seed=8)
    assert changed.read_bytes() != one[0].read_bytes()


def test_samples_carry_shard_index_and_digest(tmp_path):
    for shard, path in enumerate(write_shards(tmp_path, [4, 0, 2])):
        samples = read_oracle(path)
        assert len(samples) == [4, 0, 2][shard]
        for index, (key, members) in enumerate(samples):
            digest = xxhash.xxh3_64_hexdigest(members["jpg"])
            assert key == f"{shard:05d}{index:06d}"
            assert json.loads(members["json"]) == {"shard": shard, "index": index, "digest": digest}
            assert f"shard {shard} index {index} digest {digest}" in members["txt"].decode()
            Image.open(io.BytesIO(members["jpg"])).load()


def test_options_make_odd_shards(tmp_path):
    options = ShardOptions(
        without_text_every=2, folder="a/b.c/", extra={"CLS": b"1"}, padding_bytes=(9000, 9000)
    )
    samples = read_oracle(write_shards(tmp_path, [4], options=options)[0])
    assert [("txt" in members) for _, members in samples] == [True, False, True, False]
    assert {members["cls"] for _, members in samples} == {b"1"}
    assert all(key.startswith("a/b.c/") and len(members["jpg"]) > 9000 for key, members in samples)

"""Which shards under a path are copied: by the kind of their file system, the tier's place and its room."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
from pathlib import Path

import pytest

import streamload
from streamload.cache import copying
from streamload.cache.shard import ShardList, shard_of
from streamload.cache.tier import placed_on_disk
from streamload.options import directories, file_system, read_settings
from streamload.testing.shards import read_oracle, write_shards
from streamload.urls import expand_urls, folder_of

TABLE = """\
27 1 254:0 / / rw - ext4 /dev/vda rw
22 27 0:22 / /dev/shm rw - tmpfs tmpfs rw
40 27 0:40 / {mount} rw - {kind} server:/data rw
41 27 0:40 / {scratch} rw - {kind} server:/data rw
"""


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shards, which the table of mounts has on NFS; `scratch` is another mount of the same."""
    write_shards(tmp_path / "nas", [20] * 6)
    show(monkeypatch, tmp_path, "nfs4")
    return tmp_path / "nas"


def show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    table = TABLE.format(mount=tmp_path / "nas", scratch=tmp_path / "scratch", kind=kind)
    monkeypatch.setattr(directories, "_own_mounts", lambda: table)


def listed(mount: Path) -> ShardList:
    urls = expand_urls(f"{mount}/{{00000..00005}}.tar")
    return ShardList(urls, None, copied=copying.folders_to_copy(urls, "auto"))


@pytest.mark.parametrize(
    ("kind", "is_copied"),
    [
        *(
            (kind, True)
            for kind in ("lustre", "nfs", "beegfs", "fuse.gcsfuse", "fuse.s3fs", "fuse", "ceph", "9p")
        ),
        *(
            (f"fuse.{name}", False)
            for name in ("fuse-overlayfs", "mergerfs", "squashfuse", "bindfs", "gocryptfs")
        ),
        *((kind, False) for kind in ("ext4", "xfs", "fuseblk", "fusectl", "overlay", "tmpfs")),
    ],
)
def test_shards_on_network_file_systems_are_copied(
    kind: str, is_copied: bool, mount: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show(monkeypatch, tmp_path, kind)
    assert listed(mount).copied == ((str(mount),) if is_copied else ())
    assert copying.folders_to_copy(expand_urls(str(mount)), "never") == ()
    assert copying.folders_to_copy(expand_urls(str(mount)), "always") == ("/",)
    assert copying.folders_to_copy(expand_urls("http://host/{0..3}.tar"), "always") == ()


def test_a_folder_that_is_reached_by_links_is_named_as_it_was_given(mount: Path, tmp_path: Path) -> None:
    (tmp_path / "set").symlink_to("nas")
    (tmp_path / "data").symlink_to(tmp_path / "set")
    urls = expand_urls(f"{tmp_path}/data/{{00000..00005}}.tar")
    assert copying.folders_to_copy(urls, "auto") == (f"{tmp_path}/data",)
    (tmp_path / "links").mkdir()
    for path in mount.glob("*.tar"):
        (tmp_path / "links" / path.name).symlink_to(path)
    assert copying.folders_to_copy(expand_urls(f"{tmp_path}/links/"), "auto") == (f"{tmp_path}/links",)
    (tmp_path / "round").symlink_to("round")
    assert copying.folders_to_copy(expand_urls(f"{tmp_path}/round/{{0..3}}.tar"), "auto") == ()


def test_the_kind_of_a_network_file_system_is_found_without_touching_it(
    mount: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").symlink_to(mount)
    touched, readlink = list[str](), os.readlink

    def noted(path: str) -> str:
        touched.append(path)
        return readlink(path)

    monkeypatch.setattr(os, "readlink", noted)
    urls = expand_urls([f"{mount}/{{00000..00005}}.tar", f"{tmp_path}/data/{{0..5}}.tar"])
    monkeypatch.setattr(os, "stat", None)
    monkeypatch.setattr(os, "lstat", None)
    assert copying.folders_to_copy(urls, "auto") == (str(mount), f"{tmp_path}/data")
    assert touched
    assert not [path for path in touched if folder_of(path, [str(mount)])]


def test_an_overlay_over_memory_counts_as_memory() -> None:
    table = (
        "27 1 0:27 / / rw - overlay overlay rw,lowerdir=/ro,upperdir=/run/up,workdir=/run/work\n"
        "28 27 0:28 / /run rw - tmpfs tmpfs rw\n"
        "29 27 8:1 / /disk rw - ext4 /dev/sda1 rw\n"
        "30 27 0:30 / /var rw - overlay overlay rw,lowerdir=/ro,upperdir=/disk/up\n"
    )
    assert file_system(Path("/home/ada"), table).is_memory
    assert not file_system(Path("/var/tmp"), table).is_memory
    container = "27 1 0:27 / / rw - overlay overlay rw,lowerdir=/l,upperdir=/var/lib/docker/overlay2/a/diff\n"
    assert not file_system(Path("/home/ada"), container).is_memory


def test_a_tier_with_room_for_a_fifth_of_the_data_takes_it(mount: Path, tmp_path: Path) -> None:
    shards = listed(mount)
    data_bytes = sum(path.stat().st_size for path in mount.glob("*.tar"))
    for limit, nodes, is_copied in (
        (data_bytes * 3 // 10, 1, True),
        (data_bytes * 3 // 20, 1, False),
        (data_bytes * 3 // 20, 2, True),
        (data_bytes // 20, 2, False),
    ):
        answer = copying.decide(shards, tmp_path / "tier", limit, nodes)
        assert answer.chosen == (str(mount) if is_copied else ""), answer
        assert f"nfs4 at {mount}" in answer.why
        assert ("less than a fifth" in answer.why) is not is_copied


def test_of_a_long_list_the_shards_that_are_looked_at_stand_for_all(
    mount: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamload.cache.shard.LOOKED_THROUGH", 2)
    data_bytes = sum(path.stat().st_size for path in mount.glob("*.tar"))
    assert copying.decide(listed(mount), tmp_path / "tier", data_bytes * 3 // 10).chosen == str(mount)
    assert not copying.decide(listed(mount), tmp_path / "tier", data_bytes * 3 // 20).chosen


def test_a_tier_in_memory_or_on_the_same_file_system_takes_none(mount: Path, tmp_path: Path) -> None:
    for root, reason in (
        (mount / "tier", "is on the same one"),
        (tmp_path / "scratch" / "tier", "is on the same one"),
        (Path("/dev/shm/tier"), "is in memory"),
    ):
        answer = copying.decide(listed(mount), root, 10**9)
        assert not answer.chosen
        assert reason in answer.why


def test_a_training_says_once_what_it_found_and_decided(
    mount: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "streamload")
    settings = read_settings(cache_dir=tmp_path / "tier", cache_size="1GB")
    with contextlib.closing(placed_on_disk(settings, "test")) as placed:
        for logs in (True, False):
            shards = copying.settled(settings, listed(mount), placed, 1, logs=logs)
            assert shards.copied == (str(mount),)
    (line,) = [text for text in caplog.messages if "network file system" in text]
    assert f"(nfs4 at {mount}), and copied: the cache at {tmp_path / 'tier'} can keep 1.0 GB of about" in line


def test_a_copied_shard_is_no_local_one_in_all_lists_that_are_made_of_its_list(mount: Path) -> None:
    shards = listed(mount)
    for same in (shards, shards[1:], pickle.loads(pickle.dumps(shards)), shards.prepared_by("")):
        assert all(shard.local is None and shard.is_copied for shard in same)
        assert not any(same.are_local())
    url = f"{mount}/00000.tar"
    in_place = shard_of(url, None)
    assert in_place.local == Path(url)
    assert in_place.digest != shards[0].digest
    assert in_place.digest[:16] == shards[0].digest[:16]
    assert all(shards.copied_below(()).are_local())
    assert all(shards.copied_below((f"{mount}-other",)).are_local())


def test_a_copy_of_a_file_that_is_another_now_is_never_read(tmp_path: Path) -> None:
    """Replaced between two runs; or, in a shared cache, of another node whose path has other bytes."""

    def keys_of(cache_dir: Path, **shared: object) -> list[str]:
        cache = streamload.Cache(copy="always", **shared)  # type: ignore[arg-type]
        with streamload.make_loader(
            f"{tmp_path}/data/{{00000..00001}}.tar", batch_size=5, num_workers=0, train=False,
            preprocess=lambda image: image.width, cache_dir=cache_dir, cache=cache,
            output="dict", batches=streamload.Batches(with_keys=True),
        ) as loader:  # fmt: skip
            return [key for batch in loader for key in batch["__key__"]]

    def expected() -> list[str]:
        return [key for path in sorted((tmp_path / "data").glob("*.tar")) for key, _ in read_oracle(path)]

    shared = {"shared": tmp_path / "shared", "write_back": True}
    write_shards(tmp_path / "data", [20, 20], seed=1)
    first = expected()
    for node in ("a", "b"):
        assert keys_of(tmp_path / node, **shared) == first
    write_shards(tmp_path / "data", [7, 8], seed=2)
    assert len(expected()) == 15
    for node in ("a", "b", "c"):
        assert keys_of(tmp_path / node, **shared) == expected()
    assert keys_of(tmp_path / "d") == expected()

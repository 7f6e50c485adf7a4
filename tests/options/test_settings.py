"""Settings: which value wins, how sizes read, and where the tier goes when nobody says."""

import logging
import multiprocessing
import os
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamload.errors import OptionError
from streamload.options import (
    CacheSize,
    FreeDisk,
    default_cache_dir,
    file_system,
    parse_cache_size,
    parse_free_disk,
    parse_size,
    read_settings,
    settings,
)

MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
22 27 0:21 / /proc rw - proc proc rw
40 27 0:40 / /home rw,relatime shared:5 - nfs4 server:/home rw,vers=4.2
41 40 8:1 / /home/local\\040disk rw - xfs /dev/sdb1 rw
42 27 0:42 / /var rw - ext4 /dev/vdb rw
43 42 0:43 / /var/bucket rw master:1 propagate_from:2 - fuse.s3fs s3fs rw
44 27 0:44 / /run/user rw - tmpfs tmpfs rw
45 27 0:45 / /data rw - lustre mds@tcp:/data rw
46 27 0:46 / /data rw - ext4 /dev/vdc rw
47 27 0:47 / /windows rw - fuseblk /dev/sdc1 rw
"""


def test_arguments_win_over_variables_and_variables_over_defaults(tmp_path):
    environ = {"STREAMLOAD_CACHE_DIR": "/var/cache/sl", "STREAMLOAD_CACHE_SIZE": "500GB"}
    found = read_settings(cache_dir=tmp_path, environ=environ)
    assert found.cache_dir == tmp_path
    assert found.cache_size == CacheSize(size_bytes=500 * 10**9)
    assert found.ahead == 1024**3
    assert found.sources == {
        "cache_dir": "argument",
        "cache_size": "STREAMLOAD_CACHE_SIZE",
        "ahead": "default",
        "revalidate": "default",
        "copy": "default",
        "free_disk": "default",
        "cache": "default",
        "memory_size": "default",
        "shared_cache": "default",
        "write_back": "default",
        "shared_wait": "default",
        "origin_wait": "default",
        "max_image_pixels": "default",
        "metrics": "default",
        "record": "default",
    }


def test_the_most_pixels_of_an_image_are_a_whole_number():
    name = "STREAMLOAD_MAX_IMAGE_PIXELS"
    assert read_settings(environ={}).max_image_pixels == 20_000_000
    assert read_settings(environ={name: "90_000_000"}).max_image_pixels == 90_000_000
    assert read_settings(max_image_pixels=7, environ={name: "8"}).max_image_pixels == 7
    for wrong in ("0", "-1", "2e7", "20MP"):
        with pytest.raises(OptionError, match=f"{name}='{wrong}'"):
            read_settings(environ={name: wrong})


def test_with_nothing_set_everything_has_a_default():
    found = read_settings(environ={})
    assert found.cache_dir.is_absolute()
    assert found.cache_size == CacheSize(share=0.8)
    assert (found.revalidate, found.free_disk) == ("never", FreeDisk())
    assert set(found.sources.values()) == {"default"}


def test_an_origin_that_is_away_is_waited_for_for_as_long_as_is_said():
    assert read_settings(environ={}).origin_wait == 300.0
    assert read_settings(environ={"STREAMLOAD_ORIGIN_WAIT": "0"}).origin_wait == 0.0
    assert read_settings(environ={"STREAMLOAD_ORIGIN_WAIT": "3600"}).origin_wait == 3600.0
    for odd in ("soon", "-1", "nan", "inf"):
        with pytest.raises(OptionError, match=f"STREAMLOAD_ORIGIN_WAIT='{odd}'"):
            read_settings(environ={"STREAMLOAD_ORIGIN_WAIT": odd})


def test_the_shared_cache_is_none_unless_an_argument_or_the_variable_names_one():
    assert (read_settings(environ={}).shared_cache, read_settings(environ={}).write_back) == (None, False)
    environ = {"STREAMLOAD_SHARED_CACHE": "s3://bucket/tier", "STREAMLOAD_SHARED_WRITE_BACK": "1"}
    found = read_settings(environ=environ)
    assert (found.shared_cache, found.write_back) == ("s3://bucket/tier", True)
    found = read_settings(shared_cache="", write_back=False, environ=environ)
    assert (found.shared_cache, found.write_back) == (None, False)
    assert "bucket" not in repr(found)
    assert found.shared_wait == 120.0
    assert read_settings(environ={"STREAMLOAD_SHARED_WAIT": "0"}).shared_wait == 0.0
    for off in ("0", "no", "False"):
        assert not read_settings(environ={**environ, "STREAMLOAD_SHARED_WRITE_BACK": off}).write_back


def test_a_switch_that_is_neither_on_nor_off_fails():
    with pytest.raises(OptionError, match="STREAMLOAD_SHARED_WRITE_BACK='perhaps'"):
        read_settings(environ={"STREAMLOAD_SHARED_WRITE_BACK": "perhaps"})
    for wrong in ("soon", "-1", "nan", "inf"):
        with pytest.raises(OptionError, match=f"STREAMLOAD_SHARED_WAIT='{wrong}' is not a number of seconds"):
            read_settings(environ={"STREAMLOAD_SHARED_WAIT": wrong})
    with pytest.raises(OptionError, match="shared_cache is a int"):
        read_settings(shared_cache=7, environ={})


def test_the_cache_is_on_disk_unless_an_argument_or_the_variable_says_otherwise():
    environ = {"STREAMLOAD_CACHE": "auto", "STREAMLOAD_MEMORY_SIZE": "30%"}
    assert read_settings(environ={}).cache == "disk"
    assert read_settings(environ={}).memory_size == CacheSize(share=0.5)
    assert read_settings(environ=environ).cache == "auto"
    assert read_settings(environ=environ).memory_size == CacheSize(share=0.3)
    found = read_settings(cache="memory", memory_size="2GB", environ=environ)
    assert (found.cache, found.memory_size) == ("memory", CacheSize(size_bytes=2 * 10**9))


def test_a_place_or_size_of_the_cache_that_can_not_be_read_is_named():
    with pytest.raises(OptionError, match="STREAMLOAD_CACHE='ram'; expected one of 'auto', 'disk', 'memory'"):
        read_settings(environ={"STREAMLOAD_CACHE": "ram"})
    with pytest.raises(OptionError, match="memory_size='120%' is not a share of the free memory"):
        read_settings(memory_size="120%", environ={})


def test_an_empty_variable_counts_as_unset():
    assert read_settings(environ={"STREAMLOAD_CACHE_SIZE": " "}).sources["cache_size"] == "default"


def test_the_process_environment_is_read_when_none_is_given(monkeypatch):
    monkeypatch.setenv("STREAMLOAD_AHEAD", "2GiB")
    found = read_settings()
    assert (found.ahead, found.sources["ahead"]) == (2 * 1024**3, "STREAMLOAD_AHEAD")


def test_a_bad_value_fails_naming_its_variable_or_argument():
    with pytest.raises(OptionError, match="STREAMLOAD_CACHE_SIZE='lots'"):
        read_settings(environ={"STREAMLOAD_CACHE_SIZE": "lots"})
    with pytest.raises(OptionError, match="cache_size='lots'"):
        read_settings(cache_size="lots", environ={})
    with pytest.raises(OptionError, match="STREAMLOAD_AHEAD='-1'"):
        read_settings(environ={"STREAMLOAD_AHEAD": "-1"})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("revalidate", "often", "'never', 'start', 'always'"), ("cache", "ram", "'auto', 'disk', 'memory'")],
)
def test_a_word_that_is_not_among_those_allowed_fails_with_the_list(name, value, allowed):
    with pytest.raises(OptionError, match=f"{name}='{value}'; expected one of {allowed}"):
        read_settings(**{name: value}, environ={})
    variable = f"STREAMLOAD_{name.upper()}"
    with pytest.raises(OptionError, match=f"{variable}='{value}'; expected one of {allowed}"):
        read_settings(environ={variable: value})


def test_the_words_and_the_free_disk_are_read_from_variables_and_arguments():
    environ = {
        "STREAMLOAD_REVALIDATE": "start",
        "STREAMLOAD_CACHE": "memory",
        "STREAMLOAD_FREE_DISK": "20GB",
    }
    found = read_settings(revalidate="always", environ=environ)
    assert (found.revalidate, found.cache) == ("always", "memory")
    assert found.free_disk == FreeDisk(size_bytes=20 * 10**9)
    assert found.sources["free_disk"] == "STREAMLOAD_FREE_DISK"


@pytest.mark.parametrize(
    ("value", "floor"), [(0, 0), ("0", 0), ("5GB", 5 * 10**9), (4096, 4096), ("10%", 10**11)]
)
def test_what_stays_free_is_a_size_or_a_share_of_the_whole_disk(value, floor):
    assert parse_free_disk(value).floor_bytes(total_bytes=10**12, available_bytes=1) == floor


@pytest.mark.parametrize("value", ["lots", -1, "-1GB", "0%", "101%", True, False, None])
def test_what_is_no_size_can_not_be_kept_free(value):
    with pytest.raises(OptionError, match="free_disk="):
        parse_free_disk(value)


@pytest.mark.parametrize(
    ("total", "available", "floor"),
    [
        (10**13, 10**12, 2 * 10**11),  # 2 %
        (10**10, 10**10, 10**9),  # 1 GB
        (10**10, 10**9, 2 * 10**8),  # never more than a fifth of what there is
        (10**13, 10**11, 2 * 10**10),
    ],
)
def test_by_default_something_stays_free_on_every_disk(total, available, floor):
    assert FreeDisk().floor_bytes(total, available) == floor


@pytest.mark.parametrize("value", ["s3://bucket/cache", "", b"/tmp", 7, "a\0b"])
def test_a_cache_dir_that_is_no_local_path_fails(value):
    with pytest.raises(OptionError, match="cache_dir="):
        read_settings(cache_dir=value, environ={})


def test_a_cache_dir_is_made_absolute_and_its_tilde_expanded(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert read_settings(cache_dir="tier", environ={}).cache_dir == tmp_path / "tier"
    assert read_settings(cache_dir="~/tier", environ={}).cache_dir == Path("/home/somebody/tier")


def test_an_unknown_variable_is_warned_of_once_with_the_close_name():
    settings._warn_once.cache_clear()
    environ = {"STREAMLOAD_CACHEDIR": "/tmp/x"}
    with pytest.warns(UserWarning, match="STREAMLOAD_CACHEDIR.*did you mean STREAMLOAD_CACHE_DIR"):
        read_settings(environ=environ)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_settings(environ=environ)


def test_an_unknown_variable_without_a_close_name_is_warned_of_with_the_list():
    settings._warn_once.cache_clear()
    with pytest.warns(
        UserWarning, match="there are STREAMLOAD_AHEAD, STREAMLOAD_CACHE, STREAMLOAD_CACHE_DIR"
    ):
        read_settings(environ={"STREAMLOAD_XYZZY": "1"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4_000_000", 4_000_000),
        ("500GB", 500 * 10**9),
        ("500gb", 500 * 10**9),
        ("500G", 500 * 10**9),
        ("1.5 TiB", int(1.5 * 1024**4)),
        (" 2KiB ", 2048),
        ("7B", 7),
        (".5k", 500),
        ("1PB", 10**15),
    ],
)
def test_sizes_read_as_people_write_them(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        400 * "1",
        2**63,
        f"{400 * '1'}GB",
        "",
        "GB",
        "5 XB",
        "-5GB",
        "0",
        0,
        -1,
        "0.2",
        True,
        None,
        1.5,
        "1e9",
        "5GB5",
        "80%",
        "∞",
    ],
)
def test_text_that_is_no_size_fails(text):
    with pytest.raises(OptionError, match=r"is not a size; expected bytes"):
        parse_size(text)


@given(st.integers(1, 10**15))
def test_every_positive_int_is_its_own_size_as_number_and_as_text(number):
    assert parse_size(number) == parse_size(str(number)) == number


def test_a_share_is_of_what_is_free_plus_what_the_tier_holds():
    assert parse_cache_size("80%").limit_bytes(free_bytes=600, held_bytes=400) == 800
    assert parse_cache_size("80%").limit_bytes(free_bytes=1000, held_bytes=0) == 800
    assert parse_cache_size("1KB").limit_bytes(free_bytes=10, held_bytes=0) == 1000


@pytest.mark.parametrize("text", ["0%", "101%", "%", "-3%", "eighty%"])
def test_a_share_outside_of_the_disk_fails(text):
    with pytest.raises(OptionError, match="share of the disk"):
        parse_cache_size(text)


@pytest.mark.parametrize(
    ("path", "kind", "elsewhere"),
    [
        ("/opt/x", "ext4", False),
        ("/home/ada/.cache", "nfs4", True),
        ("/home/local disk/x", "xfs", False),
        ("/home/local diskette", "nfs4", True),
        ("/var/tmp", "ext4", False),
        ("/var/bucket/a/b", "fuse.s3fs", True),
        ("/data/set", "ext4", False),
        ("/windows/x", "fuseblk", False),
    ],
)
def test_a_path_is_on_the_file_system_that_hides_the_others(path, kind, elsewhere):
    found = file_system(Path(path), MOUNTS)
    assert (found.kind, found.is_elsewhere) == (kind, elsewhere)


def test_the_kernels_own_table_reads_and_names_the_memory_file_system():
    assert file_system(Path("/dev/shm")).is_memory
    assert file_system(Path("/proc")).kind == "proc"


def test_the_default_is_in_the_home_when_that_is_on_a_local_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "ada"))
    assert default_cache_dir({}, MOUNTS) == tmp_path / "ada/.cache/streamload"
    assert default_cache_dir({"XDG_CACHE_HOME": f"{tmp_path}/c"}, MOUNTS) == tmp_path / "c/streamload"


@pytest.mark.parametrize("cache_home", ["/home/ada", "/run/user/0", "/var/bucket"])
def test_the_default_is_in_var_tmp_when_the_home_is_on_a_network_or_in_memory(cache_home):
    expected = Path(f"/var/tmp/streamload-{os.getuid()}")
    assert default_cache_dir({"XDG_CACHE_HOME": cache_home}, MOUNTS) == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize(
    ("home", "problem"),
    [
        (None, "user 54321 has no home directory"),
        ("/", "/.cache can't be written"),
        ("/root", "/root/.cache can't be written"),
        ("relative", "the home directory 'relative' isn't an absolute path"),
    ],
)
def test_without_a_home_that_can_be_written_the_default_is_in_var_tmp_and_that_is_said_once(home, problem):
    """A process with a user ID that has no passwd entry, as in a container of Kubernetes."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=default_of_another_user, args=(home, answers))
    process.start()
    directories, said = answers.get()
    process.join()
    assert directories == ["/var/tmp/streamload-54321"] * 2
    advice = "so the cache is in /var/tmp/streamload-54321: set STREAMLOAD_CACHE_DIR to have it elsewhere"
    assert said == [f"{problem}, {advice}"]


def default_of_another_user(home, answers):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("streamload").addHandler(handler)
    os.setgroups([])
    os.setresgid(54321, 54321, 54321)
    os.setresuid(54321, 54321, 54321)
    os.environ.pop("HOME", None)
    if home is not None:
        os.environ["HOME"] = home
    directories = [str(default_cache_dir({}, MOUNTS)) for _ in range(2)]
    answers.put((directories, said))


def test_a_directory_in_a_home_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv("STREAMLOAD_CACHE_DIR", "~no-such-user/cache")
    with pytest.raises(
        OptionError, match=r"STREAMLOAD_CACHE_DIR='~no-such-user/cache': there is no such home"
    ):
        read_settings()


def test_a_relative_directory_is_refused_where_the_current_one_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert read_settings(cache_dir="/srv/cache").cache_dir == Path("/srv/cache")
    with pytest.raises(OptionError, match=r"the current directory can't be used .No such file"):
        read_settings(cache_dir="cache")


def test_a_system_without_a_mount_table_counts_as_local():
    assert not file_system(Path("/anywhere"), "").is_elsewhere

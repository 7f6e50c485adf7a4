"""What limits, and what to change: a judgement of figures alone, case by case."""

from dataclasses import replace

import pytest

from streamload.profile.run import medians, rotated
from streamload.profile.verdict import BenchFigures, verdict

DECODING = BenchFigures(
    link=2000,
    disk=9000,
    loader=600,
    consumer=None,
    floor_cpu_us=3000,
    loader_cpu_us=3300,
    workers=2,
    cores=2,
    width=256,
    height=256,
    size_bytes=110_000_000,
    samples=1000,
    batch_size=64,
)


def judged(**figures):
    found = verdict(replace(DECODING, **figures))
    return found.first_epoch, found.later_epochs, "\n".join(found.lines)


def test_decode_limits_where_all_else_is_faster():
    first, later, words = judged()
    assert (first, later) == ("decode", "decode")
    assert words.startswith(
        "Every epoch is limited by decoding and resizing: 600 images/s with 2 workers; 91% "
    )
    assert "the first one too: the link delivers 2,000" in words
    assert "All 2 cores are used" in words
    assert not any(other in words for other in ("streamload warm", "faster disk", "preprocess=", "Smaller"))


def test_the_link_limits_the_first_epoch_alone():
    first, later, words = judged(link=180)
    assert (first, later) == ("link", "decode")
    assert (
        "The first epoch is limited by the link: it delivers 180 images/s, the loader reaches 600." in words
    )
    assert "Later epochs, from the cache, are limited by decoding and resizing: 600 images/s" in words
    assert "streamload warm URLS" in words
    assert "(110.0 KB per image)" in words


def test_local_shards_have_no_link():
    first, later, words = judged(link=None)
    assert (first, later) == ("decode", "decode")
    assert words.startswith("Every epoch is limited by decoding and resizing: ")
    assert "link" not in words
    assert "the first one too" not in words


def test_the_disk_limits_later_epochs_alone():
    first, later, words = judged(disk=500)
    assert (first, later) == ("decode", "disk")
    assert "Later epochs, from the cache, are limited by the disk: it reads 500 images/s" in words
    assert "STREAMLOAD_CACHE=memory" in words


def test_a_slow_disk_under_local_shards_limits_every_epoch():
    assert judged(link=None, disk=500)[:2] == ("disk", "disk")


def test_without_a_disk_nothing_is_said_of_it():
    first, later, words = judged(disk=None)
    assert (first, later) == ("decode", "decode")
    assert "disk" not in words


@pytest.mark.parametrize(
    ("loader_cpu_us", "limit"), [(4000, "decode"), (4004, "hand-over"), (2900, "decode")]
)
def test_the_hand_over_limits_from_a_quarter_of_the_cpu_time_on(loader_cpu_us, limit):
    first, later, words = judged(loader_cpu_us=loader_cpu_us)
    assert (first, later) == (limit, limit)
    assert ("overhead beside decoding" in words) is (limit == "hand-over")
    assert ("Leave out preprocess=" in words) is (limit == "hand-over")


def test_no_more_than_all_of_the_cpu_time_is_the_floors():
    assert "; 100% of the CPU time" in judged(loader_cpu_us=2900)[2]
    assert "; 100% of the CPU time" in judged(loader_cpu_us=0)[2]  # of few samples, too little to measure


@pytest.mark.parametrize(
    ("workers", "loader_cpu_us", "more", "fewer", "all_used"),
    [
        (1, 3300, True, False, False),
        (2, 3300, False, False, True),
        (3, 3300, False, False, True),
        (1, 6000, True, False, False),
        (2, 6000, False, False, False),
        (3, 6000, False, True, False),
    ],
)
def test_workers_are_set_beside_cores(workers, loader_cpu_us, more, fewer, all_used):
    words = judged(workers=workers, loader_cpu_us=loader_cpu_us)[2]
    assert (f"More workers: {workers} of 2 cores are used" in words) is more
    assert (f"Fewer workers: {workers} share 2 cores" in words) is fewer
    assert ("All 2 cores are used" in words) is all_used


def test_a_training_that_takes_less_is_the_limit():
    first, later, words = judged(consumer=599)
    assert (first, later) == ("consumer", "consumer")
    assert "the training itself: it consumes 599 images/s, the loader reaches 600" in words
    assert "A faster loader wouldn't make the training faster" in words
    assert judged(consumer=601)[:2] == ("decode", "decode")
    assert judged(consumer=300, link=200)[:2] == ("link", "consumer")


def test_without_a_step_the_longest_that_never_waits_is_said():
    assert "steps take more than 107 ms for 64 images" in judged()[2]  # 64 / 600 s
    assert "steps take more than 128 ms for 64 images" in judged(disk=500)[2]
    assert "steps take" not in judged(consumer=1000)[2]


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ((256, 256), None),
        ((313, 313), None),  # 1.495 times the pixels
        ((314, 314), "66%"),  # 1.505 times
        ((500, 375), "47%"),  # 341 × 256 of 500 × 375
        ((375, 500), "47%"),
        ((0, 0), None),
    ],
)
@pytest.mark.parametrize("limit", [{}, {"link": 10}, {"disk": 10}])
def test_smaller_images_are_advised_where_they_are_large(size, said, limit):
    words = judged(width=size[0], height=size[1], **limit)[2]
    assert ("Smaller images" in words) is (said is not None)
    if said is not None:
        assert (
            f"their mean size is {size[0]}×{size[1]}; for a training at 224, a short side of 256 is enough, "
            f"and has {said}" in words
        )


def test_smaller_images_do_not_help_a_training_that_is_the_limit():
    assert "Smaller images" not in judged(width=2000, height=2000, consumer=100)[2]


def test_each_advice_is_given_once():
    lines = verdict(replace(DECODING, link=10, disk=20, width=2000, height=1000)).lines
    assert len(lines) == len(set(lines))
    assert sum("Smaller images" in line for line in lines) == 1


def test_each_contender_begins_a_round_once():
    assert [rotated("abc", round_) for round_ in range(4)] == [
        list("abc"),
        list("bca"),
        list("cab"),
        list("abc"),
    ]


def test_medians_are_of_each_labels_numbers():
    rows = [{"label": "a", "round": n, "x": x, "word": "w"} for n, x in enumerate((3, 1, 8))]
    assert medians([*rows, {"label": "b", "round": 0, "y": 2.5}]) == {"a": {"x": 3}, "b": {"y": 2.5}}

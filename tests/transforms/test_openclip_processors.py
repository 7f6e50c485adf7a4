"""transformers' image processors on torchvision, held to their plans: the environment of open_clip has it."""

import warnings

import pytest

from benchmarks.torchvision_stub import define_torchvision_schemas
from streamload.transforms.plan import NotRecognised
from streamload.transforms.processors import plan_of
from tests.support.processors import NAMES, SIZED, assert_exact

define_torchvision_schemas()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchvision")
    transformers = pytest.importorskip("transformers")


def processor(name, **options):
    kind = getattr(transformers, f"{name}ImageProcessor")
    return kind(**{**SIZED.get(name, {}), **options})


@pytest.mark.parametrize("name", NAMES)
def test_a_processor_of_tensors_gives_the_same_bits_by_its_plan(name):
    plan = assert_exact(processor(name), photographs=27)
    assert plan.on_tensors


def test_levels_of_a_processor_of_tensors_are_the_same():
    assert_exact(processor("CLIP", do_normalize=False, do_rescale=False), photographs=5)


def test_a_processor_of_tensors_whose_floats_would_round_otherwise_runs_as_given():
    with pytest.raises(NotRecognised, match="to the bit"):
        plan_of(processor("CLIP", do_normalize=False))

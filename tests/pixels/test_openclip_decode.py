"""Under OpenCLIP: its transforms decoded by the rank, and `--streamload-decode`."""

import pytest

from streamload.errors import OptionError
from streamload.integrations.openclip.arguments import take_own
from tests.pixels.test_decode_option import make, same, shards  # noqa: F401  (a fixture)
from tests.support import flat


def test_a_transform_of_torchvision_gives_the_same_images(shards, tmp_path):  # noqa: F811
    transforms = pytest.importorskip("torchvision.transforms")
    bicubic = transforms.InterpolationMode.BICUBIC
    steps = [transforms.RandomResizedCrop((40, 70), (0.1, 0.9), interpolation=bicubic)]
    steps += [transforms.RandomHorizontalFlip(), transforms.RandomGrayscale(0.3), transforms.ToTensor()]
    steps += [transforms.Normalize((0.5,) * 3, (0.2, 0.3, 0.4))]
    options = {"preprocess": transforms.Compose(steps)}
    with make(shards, tmp_path, **options) as loader, make(shards, tmp_path, "host", **options) as host:
        assert all(same(batch, expected) for batch, expected in zip(loader, host, strict=True))


def test_functions_without_a_form_on_a_device_are_refused_by_name(shards):  # noqa: F811
    transforms = pytest.importorskip("torchvision.transforms")
    steps = [transforms.RandomResizedCrop(32, interpolation=transforms.InterpolationMode.BICUBIC)]
    chain = transforms.Compose([*steps, transforms.GaussianBlur(3), transforms.ToTensor()])
    with pytest.raises(OptionError, match="GaussianBlur"):
        flat.make_loader(shards, decode="device", preprocess=chain)


def test_the_flag_is_streamloads_own():
    own, others = take_own(["--workers", "3", "--streamload-decode", "auto", "--epochs", "1"])
    assert own.decode == "auto"
    assert others == ["--workers", "3", "--epochs", "1"]
    assert take_own([])[0].decode == "host"

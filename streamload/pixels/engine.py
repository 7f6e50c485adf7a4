"""JPEG by a GPU's engine, through NVIDIA's nvImageCodec: `pip install streamload[gpu]`.

Chosen by what libraries state: nvImageCodec decodes batches by the hardware engine where there is one (A100
and later data-centre GPUs) and by CUDA kernels elsewhere, says of each image whether it failed, leaves EXIF
orientation alone, as our other decoders do, and can interpolate chroma as libjpeg-turbo does. torchcodec's
and torchvision's decoders fail a whole batch for one image, and torchcodec's rotates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from streamload.errors import DecodeError, OptionError
from streamload.pixels.segments import File
from streamload.transforms.decode import jpeg_size

_OPTIONS = ":fancy_upsampling=1"
"""Interpolate chroma, where the decoder can: not the default of each version."""
_THREADS = 1
"""Threads of the library's executor for work that the engine leaves to the CPU: workers have the cores."""
_FAILED = "the device's decoder could not decode the image"


class EngineDecoder:
    """Decodes JPEG on a CUDA device, on the current stream. See ImageDecoder.

    Args:
        device: with CUDA.
        most_pixels: of an image (transforms/limits.py).

    Raises:
        OptionError: another device, or nvImageCodec is missing.
    """

    def __init__(self, device: torch.device, most_pixels: int) -> None:
        if device.type != "cuda" or torch.version.hip is not None:
            raise OptionError(
                f"Images(decode='device') decodes by NVIDIA's JPEG engine, and the device is {device}: use a "
                f"CUDA device, or decode='host'"
            )
        library = _library()
        index = torch.cuda.current_device() if device.index is None else device.index
        self.name = f"nvImageCodec {library.__version__}"
        self._device, self._most_pixels = torch.device("cuda", index), most_pixels
        self._stream_of: Any = library.CodeStream
        self._params = library.DecodeParams(apply_exif_orientation=False)
        # All that the engine can decode is decoded by it: how a batch were shared would change its pixels.
        kinds, all_of_them = library.BackendKind, library.LoadHintPolicy.FIXED
        engine = library.Backend(kinds.HW_GPU_ONLY, load_hint=1.0, load_hint_policy=all_of_them)
        backends = [engine, library.Backend(kinds.GPU_ONLY), library.Backend(kinds.HYBRID_CPU_GPU)]
        self._decoder = library.Decoder(
            device_id=index, max_num_cpu_threads=_THREADS, backends=backends, options=_OPTIONS
        )

    def decode(self, files: Sequence[File]) -> list[torch.Tensor | DecodeError]:
        """Decode files on the engine, in the current stream; what it refuses is an error."""
        streams = [self._stream_of(np.frombuffer(file, np.uint8)) for file in files]
        current = torch.cuda.current_stream(self._device).cuda_stream
        images = self._decoder.decode(streams, params=self._params, cuda_stream=current)
        if any(image is None for image in images):
            self._check_memory(files)
        return [_pixels(image) for image in images]

    def _check_memory(self, files: Sequence[File]) -> None:
        """Tell a full memory, for which the library has no error of its own, from damaged files."""
        sizes = [jpeg_size(file, self._most_pixels) or (0, 0) for file in files]
        needed_bytes = sum(height * width * 3 for height, width in sizes)
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        if free_bytes < needed_bytes:
            raise torch.OutOfMemoryError(
                f"{len(files)} images of {needed_bytes >> 20} MiB could not be decoded: the device has "
                f"{free_bytes >> 20} MiB left"
            )


def _pixels(image: Any) -> torch.Tensor | DecodeError:
    return DecodeError(_FAILED) if image is None else from_dlpack(image)


@functools.cache
def _library() -> ModuleType:
    try:
        from nvidia import nvimgcodec
    except ImportError as error:
        raise OptionError(
            f"Images(decode='device') on a GPU needs nvImageCodec: pip install 'streamload[gpu]', or "
            f"nvidia-nvimgcodec-cu12 for CUDA 12 ({error})"
        ) from error
    module: ModuleType = nvimgcodec
    return module

"""OpenCLIP's own training, with streamload under it.

    python -m streamload.integrations.openclip --dataset-type webdataset --train-data URLS … (its arguments)

or, in a script of one's own, `install()` before `open_clip_train.main.main(arguments)`. The one function that
OpenCLIP looks up to open WebDataset shards is replaced; its sizes and its rounding are kept, so that learning
rates fall as before. Known to it: open_clip 3.3.0, and the development version, whose batches are dicts.

With --dataset-resampled it has a rule of its own: nothing is drawn, each pass of a source gives each sample
once. --train-data-upsampling-factors, which don't need that flag here, mix the sources in the shares that
drawing their shards by factor has on average. Bad samples and shards never end a run.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal

from streamload.errors import OptionError
from streamload.integrations.openclip.arguments import (
    parser,
    refuse_unknown,
    selected,
    take_own,
    told_by_flags,
)
from streamload.integrations.openclip.data import Batches, Data, training, validation
from streamload.loader import Cache, Images
from streamload.transforms import kernel

__all__ = ["Batches", "Data", "install", "main"]


def install(
    module: ModuleType | None = None,
    *,
    compile: bool = True,  # noqa: A002
    shared_cache: str | None = None,
    prepare: str | None = None,
    moved: Sequence[tuple[str, str]] = (),
) -> Callable[[], None]:
    """Make OpenCLIP read WebDataset shards through streamload.

    Bad samples and shards never end its training or evaluation, as they don't with its own loader.

    Args:
        module: its data module; None finds `open_clip_train.data` (`training.data` up to 2.24). With it goes
            the `legacy_data` beside it, of the development version's second entry point.
        compile: False runs OpenCLIP's transforms as given instead of compiled (make_loader's `compile`). That
            of validation is compiled only where its batches are OpenCLIP's own to the bit
            (docs/guides/transforms.md).
        shared_cache: make_loader's; None: STREAMLOAD_SHARED_CACHE, if that is set.
        prepare: train on prepared images (`Images(prepare=…)`); validation never does.
        moved: with --resume: (old, new) beginnings of URLs of shards that have moved since
            (`Loader.load_state_dict`).

    Returns:
        A function that puts the original back.

    Raises:
        ImportError: open_clip's training code isn't installed.
    """
    module = module or _data_module()
    seams = [(module, "get_wds_dataset", False)]
    legacy = _module_beside(module, "legacy_data")
    if legacy is not None:
        seams.append((legacy, "get_wds_dataset_legacy", True))
    originals = [(place, name, getattr(place, name)) for place, name, _ in seams]
    cache = Cache(shared=shared_cache)

    def stand_in(original: Callable[..., Any], is_legacy: bool) -> Callable[..., Data]:
        as_dict = is_legacy or "naflex_data_config" in inspect.signature(original).parameters
        output: Literal["dict", "tuple"] = "dict" if as_dict else "tuple"

        def get_wds_dataset(
            args: Any,
            preprocess_img: Callable[[Any], Any],
            is_train: bool,
            epoch: int = 0,
            floor: bool = False,
            tokenizer: Any = None,
            **more: Any,
        ) -> Data:
            unknown = sorted(name for name, value in more.items() if value is not None)
            if unknown:
                raise OptionError(
                    f"streamload doesn't know what OpenCLIP's {', '.join(unknown)} asks of a loader"
                )
            refuse_unknown(args)
            common = {"tokenizer": tokenizer, "preprocess": preprocess_img, "output": output, "cache": cache}
            with told_by_flags(args):
                shards, most_pixels = selected(args, legacy=is_legacy)
                common["shards"] = shards
                if is_train:
                    common["images"] = Images(compile=compile, prepare=prepare, max_pixels=most_pixels)
                    return training(args, common, epoch, floor, moved)
                is_exact = not kernel.why_not()  # what is reported is compared to the digit
                common["images"] = Images(compile=compile and is_exact, max_pixels=most_pixels)
                return validation(args, common)

        return get_wds_dataset

    for place, name, is_legacy in seams:
        setattr(place, name, stand_in(getattr(place, name), is_legacy))

    def uninstall() -> None:
        for place, name, original in originals:
            setattr(place, name, original)

    return uninstall


def _data_module() -> ModuleType:
    for name in ("open_clip_train.data", "training.data"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as exc:
            if exc.name not in (name, name.partition(".")[0]):
                raise
    raise ImportError("open_clip's training code isn't installed: pip install 'open_clip_torch[training]'")


def _module_beside(data: ModuleType, name: str) -> ModuleType | None:
    """Another module of OpenCLIP's training code; None where this version has none."""
    package = data.__name__.rpartition(".")[0]
    try:
        return importlib.import_module(f"{package}.{name}") if package else None
    except ImportError:
        return None


def main(arguments: list[str]) -> None:
    """Run OpenCLIP's training on streamload.

    Args:
        arguments: open_clip_train's, and those that begin with --streamload-, which `--help` shows
            (install() says what they do). A leading "--" is passed over:
            `torchrun -m streamload.integrations.openclip -- --logs DIR` needs it to leave --logs alone.

    Raises:
        ImportError: open_clip's training code isn't installed, or has no legacy_main where that is asked for.
    """
    own, arguments = take_own(arguments[1:] if arguments[:1] == ["--"] else arguments)
    if "-h" in arguments or "--help" in arguments:
        print(parser().format_help(), flush=True)  # OpenCLIP's own comes after it
    data = _data_module()
    moved = [(old, new) for old, new in own.moved or ()]
    install(data, compile=own.compile, shared_cache=own.shared_cache, prepare=own.prepare, moved=moved)
    name = "legacy_main" if own.legacy_main else "main"
    importlib.import_module(data.__name__.replace(".data", f".{name}")).main(arguments)

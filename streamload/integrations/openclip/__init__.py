"""OpenCLIP's training code on streamload.

    python -m streamload.integrations.openclip --dataset-type webdataset --train-data URLS … (its arguments)

or, in your script, `install()` before `open_clip_train.main.main(arguments)`. It replaces the function with
which OpenCLIP opens WebDataset shards. Numbers of batches are rounded as OpenCLIP does, so the learning rate
schedule stays the same. Supports open_clip 3.3.0 and the development version, whose batches are dicts, with
its --use-naflex and captions of several lengths.

With --dataset-resampled, shards are still not drawn at random: each pass yields each sample once.
--train-data-upsampling-factors, which don't need that flag here, mix the sources in the proportions that
drawing shards by factor has on average. Bad samples and shards never end a run.
"""

from __future__ import annotations

import contextlib
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
from streamload.integrations.openclip.data import Data, EpochBatches, device_of, training, validation
from streamload.integrations.openclip.logs import report_in
from streamload.integrations.openclip.naflex import refuse_other_transforms, text_options
from streamload.integrations.openclip.row_losses import report_rows
from streamload.loader import Cache, Images, Loader
from streamload.steering.progress import Progress
from streamload.steering.schedule import Schedule
from streamload.transforms import kernel

__all__ = ["Data", "EpochBatches", "install", "main"]


def install(
    module: ModuleType | None = None,
    *,
    compile: bool = True,  # noqa: A002
    shared_cache: str | None = None,
    prepare: str | None = None,
    decode: Literal["host", "device", "auto"] = "host",
    moved: Sequence[tuple[str, str]] = (),
    mixing: Schedule | Progress | None = None,
    on_device: bool = True,
    journal: bool = True,
) -> Callable[[], None]:
    """Make OpenCLIP read WebDataset shards through streamload.

    Bad samples and shards never end a training or evaluation, as with OpenCLIP's own loader.

    Args:
        module: OpenCLIP's data module; None finds `open_clip_train.data` (`training.data` up to 2.24). The
            development version's `legacy_data` beside it is patched, too.
        compile: False runs OpenCLIP's transforms as given instead of compiled (make_loader's `compile`). The
            validation transform is compiled only where its batches are bit-identical to OpenCLIP's
            (docs/guides/transforms.md).
        shared_cache: as for make_loader; None: STREAMLOAD_SHARED_CACHE, if set.
        prepare: train on prepared images (`Images(prepare=…)`); validation never does.
        decode: where the training's images are decoded (`Images(decode=…)`); those of validation always are
            in workers, so that its results are comparable.
        moved: with --resume: (old, new) URL prefixes of shards that have moved (`Loader.load_state_dict`).
        mixing: how the weights of the sources of `--train-data a::b` change; they are named "0", "1", …. For
            Progress the training reports the loss of each row among those of its rank. Changes are logged to
            decisions.jsonl in the folder of the run's logs.
        journal: keep a journal of the run beside its checkpoints (`Order(journal=…)`), with the losses of
            rows among those of their rank, where OpenCLIP's loss is known.
        on_device: batches are on OpenCLIP's device ahead of the step; False leaves them in host memory, from
            which OpenCLIP copies them.

    Returns:
        A function that restores the original.

    Raises:
        ImportError: open_clip's training code isn't installed.
        OptionError: this version's losses can't be reported, for Progress.
    """
    module = module or _data_module()
    seams = [(module, "get_wds_dataset", False)]
    legacy = _module_beside(module, "legacy_data")
    if legacy is not None:
        seams.append((legacy, "get_wds_dataset_legacy", True))
    cache = Cache(shared=shared_cache)
    restores = contextlib.ExitStack()
    loaders: list[Loader] = []  # the last one that was made for training with reports
    needs_losses = isinstance(mixing, Progress)
    if needs_losses or journal:
        entries = [_module_beside(module, name) for name in ("main", "legacy_main")]
        present = [entry for entry in entries if entry is not None]
        restores.callback(
            report_rows(present, lambda: loaders[-1] if loaders else None, is_required=needs_losses)
        )

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
            naflex = more.pop("naflex_data_config", None)
            unknown = sorted(name for name, value in more.items() if value is not None)
            if unknown:
                raise OptionError(f"streamload doesn't support OpenCLIP's {', '.join(unknown)}")
            refuse_unknown(args)
            refuse_other_transforms(args, naflex, preprocess_img, is_train=is_train)
            common: dict[str, Any] = {"preprocess": preprocess_img, "output": output, "cache": cache}
            common["device"] = device_of(args) if on_device else "cpu"
            with told_by_flags(args):
                shards, most_pixels = selected(args, legacy=is_legacy)
                common |= {"shards": shards, **text_options(args, tokenizer, is_train=is_train)}
                if is_train:
                    common["images"] = Images(
                        compile=compile, prepare=prepare, decode=decode, max_pixels=most_pixels
                    )
                    data = training(args, common, epoch, floor, moved, naflex, mixing, has_journal=journal)
                    if needs_losses or data.dataloader.loader.options.order.journal is not None:
                        loaders[:] = [data.dataloader.loader]
                    return data
                is_exact = not kernel.why_not()  # reported metrics must be comparable
                common["images"] = Images(compile=compile and is_exact, max_pixels=most_pixels)
                return validation(args, common, naflex)

        return get_wds_dataset

    for place, name, is_legacy in seams:
        original = getattr(place, name)
        restores.callback(setattr, place, name, original)
        setattr(place, name, stand_in(original, is_legacy))
    for prefix in ("", "legacy_"):
        main_module, train_module = (_module_beside(module, prefix + name) for name in ("main", "train"))
        if main_module is not None and train_module is not None and hasattr(main_module, "train_one_epoch"):
            restores.callback(report_in(main_module, train_module))
    return restores.close


def _data_module() -> ModuleType:
    for name in ("open_clip_train.data", "training.data"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as exc:
            if exc.name not in (name, name.partition(".")[0]):
                raise
    raise ImportError("open_clip's training code isn't installed: pip install 'open_clip_torch[training]'")


def _module_beside(data: ModuleType, name: str) -> ModuleType | None:
    """Another module of OpenCLIP's training code; None if this version has none."""
    package = data.__name__.rpartition(".")[0]
    try:
        return importlib.import_module(f"{package}.{name}") if package else None
    except ImportError:
        return None


def main(arguments: list[str]) -> None:
    """Run OpenCLIP's training on streamload.

    Args:
        arguments: open_clip_train's, and those starting with --streamload-, which `--help` lists (see
            `install`). A leading "--" is ignored: torchrun needs it to not parse --logs itself, as in
            `torchrun -m streamload.integrations.openclip -- --logs DIR`.

    Raises:
        ImportError: open_clip's training code isn't installed, or lacks the requested legacy_main.
    """
    options, arguments = take_own(arguments[1:] if arguments[:1] == ["--"] else arguments)
    if "-h" in arguments or "--help" in arguments:
        print(parser().format_help(), flush=True)  # OpenCLIP's own comes after it
    data = _data_module()
    moved = [(old, new) for old, new in options.moved or ()]
    install(
        data,
        compile=options.compile,
        shared_cache=options.shared_cache,
        prepare=options.prepare,
        decode=options.decode,
        moved=moved,
        mixing=options.mixing,
        journal=options.journal,
        on_device=options.device != "none",
    )
    name = "legacy_main" if options.legacy_main else "main"
    importlib.import_module(data.__name__.replace(".data", f".{name}")).main(arguments)

"""OpenCLIP's own training, with streamload under it.

    python -m streamload.integrations.openclip --dataset-type webdataset --train-data URLS … (its arguments)

or, in a script of one's own, `install()` before `open_clip_train.main.main(arguments)`. The one function that
OpenCLIP looks up to open WebDataset shards is replaced; its sizes and its rounding are kept, so that learning
rates fall as before. Known to it: open_clip 3.3.0, and the development version, whose batches are dicts.

With --dataset-resampled it has a rule of its own: nothing is drawn, each pass of a source gives each sample
once. --train-data-upsampling-factors, which don't need that flag here, mix the sources in the shares that
drawing their shards by factor has on average.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

from streamload.errors import OptionError
from streamload.integrations.openclip.arguments import refuse_unknown, selected, take_own
from streamload.integrations.openclip.data import Batches, Data, training, validation
from streamload.loader.options import at_least
from streamload.transforms import kernel

__all__ = ["Batches", "Data", "install", "main"]


def install(
    module: ModuleType | None = None,
    *,
    save_steps: int = 0,
    compile: bool = True,  # noqa: A002
    shared_cache: str | None = None,
    prepare: str | None = None,
) -> Callable[[], None]:
    """Make OpenCLIP read WebDataset shards through streamload.

    Args:
        module: its data module; None finds `open_clip_train.data` (`training.data` up to 2.24).
        save_steps: after how many steps, again and again, the loader's state is written beside OpenCLIP's
            checkpoints, so that --resume goes on behind the last of them. 0: only that of each epoch's end.
        compile: False runs OpenCLIP's transforms as given instead of compiled (make_loader's `compile`). That
            of validation is compiled only where its batches are OpenCLIP's own to the bit
            (docs/transforms.md).
        shared_cache: make_loader's; None: STREAMLOAD_SHARED_CACHE, if that is set.
        prepare: train on prepared images (make_loader's `prepare`); validation never does.

    Returns:
        A function that puts the original back.

    Raises:
        ImportError: open_clip's training code isn't installed.
        OptionError: save_steps is no whole number from 0.
    """
    at_least(0, save_steps=save_steps)
    module = module or _data_module()
    original = module.get_wds_dataset
    as_dict = "naflex_data_config" in inspect.signature(original).parameters

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
        output: Literal["dict", "tuple"] = "dict" if as_dict else "tuple"
        common = {"tokenizer": tokenizer, "preprocess": preprocess_img, "compile": compile, "output": output}
        common["shared_cache"] = shared_cache
        common |= selected(args)
        if not is_train:
            is_exact = not kernel.why_not()  # what is reported is compared to the digit
            return validation(args, common | {"compile": compile and is_exact})
        return training(args, common | {"prepare": prepare}, epoch, floor, save_steps)

    def uninstall() -> None:
        module.get_wds_dataset = original  # type: ignore[attr-defined]

    module.get_wds_dataset = get_wds_dataset  # type: ignore[attr-defined]
    return uninstall


def _data_module() -> ModuleType:
    for name in ("open_clip_train.data", "training.data"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as exc:
            if exc.name not in (name, name.partition(".")[0]):
                raise
    raise ImportError("open_clip's training code isn't installed: pip install 'open_clip_torch[training]'")


def main(arguments: list[str]) -> None:
    """Run OpenCLIP's training on streamload.

    Args:
        arguments: open_clip_train's, --streamload-save-steps N, --streamload-as-given, which is
            compile=False, --streamload-shared-cache URL, and --streamload-prepare RECIPE (install() says
            what they do). A leading "--" is passed over:
            `torchrun -m streamload.integrations.openclip -- --logs DIR` needs it to leave --logs alone.
    """
    own, arguments = take_own(arguments[1:] if arguments[:1] == ["--"] else arguments)
    data = _data_module()
    install(data, **own._asdict())
    train = importlib.import_module(data.__name__.replace(".data", ".main"))
    train.main(arguments)

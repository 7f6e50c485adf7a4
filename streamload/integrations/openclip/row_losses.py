"""Each row's loss in OpenCLIP's training, reported to the loader for a policy that decides on weights.

OpenCLIP's loss is left as it is: a hook, called after it, computes the losses of the rank's own rows once
more from the same features, without gradients and without other ranks. So their negatives are those of the
rank's own batch. They are weighted as if the sources' shares were those of the start: else the loss of a
source would fall whenever it has fewer rows among its negatives, and a policy took that for learning.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from streamload.errors import OptionError
from streamload.loader import Loader

_CONTRASTIVE, _SIGMOID = "ClipLoss", "SigLipLoss"
_CHUNK_ROWS = 1024  # logits are made for so many rows at a time, which bounds their memory


def report_rows(
    modules: Sequence[ModuleType], loader: Callable[[], Loader | None], *, is_required: bool = True
) -> Callable[[], None]:
    """Make OpenCLIP's trainings report a loss and a cosine for each row of a batch.

    Args:
        modules: open_clip_train.main, and those beside it that make a loss with its `create_loss`.
        loader: returns the loader of the training data, None: it isn't read by streamload.
        is_required: whether a training whose losses by row aren't known is refused; else none are reported.

    Returns:
        A function that restores the original.

    Raises:
        OptionError: none of them has a create_loss.
    """
    originals = [(module, module.create_loss) for module in modules if hasattr(module, "create_loss")]
    if not originals and is_required:
        raise OptionError(
            "--streamload-mixing progress: this version of OpenCLIP's main has no create_loss, without which "
            "no losses by row can be reported. Give schedule=FILE"
        )
    restores = contextlib.ExitStack()
    for module, original in originals:
        restores.callback(setattr, module, "create_loss", original)
        module.create_loss = _reporting(original, loader, is_required)  # type: ignore[attr-defined]
    return restores.close


def _reporting(
    original: Callable[..., Any], loader: Callable[[], Loader | None], is_required: bool
) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_loss(args: Any) -> Any:
        training, loss = loader(), original(args)
        kind = type(loss).__name__
        accumulated = getattr(args, "accum_freq", 1)
        problem = ""
        if training is None:
            problem = "streamload doesn't read the training data; expected --dataset-type webdataset"
        elif accumulated != 1:
            problem = f"--accum-freq {accumulated} computes the loss of several batches together; expected 1"
        elif kind not in (_CONTRASTIVE, _SIGMOID):
            problem = f"no losses by row are known for {kind}; expected the loss of CLIP or of --siglip"
        if problem and not is_required:
            return loss
        if problem:
            raise OptionError(f"--streamload-mixing progress: {problem}. Or give schedule=FILE")
        report = _Report(training, inspect.signature(loss.forward), is_sigmoid=kind == _SIGMOID)
        loss.register_forward_hook(report, with_kwargs=True)
        return loss

    return create_loss


class _Report:
    """The hook of one loss."""

    def __init__(self, loader: Any, signature: inspect.Signature, *, is_sigmoid: bool):
        self._loader = loader
        self._signature = signature
        self._is_sigmoid = is_sigmoid

    def __call__(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        bound = self._signature.bind(*args, **kwargs).arguments
        images, texts = bound["image_features"].detach(), bound["text_features"].detach()
        scale, bias = bound["logit_scale"], bound.get("logit_bias")
        info, weights = self._loader.info, None
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            if info.importance is not None:
                importance = torch.tensor(info.importance).to(images.device, non_blocking=True)
                weights = importance[info.source.to(images.device)]
            losses = row_losses(images, texts, scale, bias, is_sigmoid=self._is_sigmoid, weights=weights)
            cosines = F.cosine_similarity(images.float(), texts.float())
        self._loader.report(loss=losses, alignment=cosines)


def row_losses(
    images: torch.Tensor,
    texts: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_sigmoid: bool = False,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the loss of each row among the rows given; their mean is OpenCLIP's loss on one rank.

    Args:
        images, texts: features, float[N, D].
        scale, bias: by which cosines become logits, as given to OpenCLIP's loss.
        is_sigmoid: the sigmoid loss of an image with all texts (SigLIP), instead of the mean of the cross
            entropies of an image with all texts and of a text with all images.
        weights: float32[N], of each row as a negative of others; None: 1.

    Returns:
        float32[N].
    """
    images, texts = images.float(), texts.float()
    scale = scale.float()
    shift = 0.0 if bias is None else bias.float()
    losses = []
    for start in range(0, len(images), _CHUNK_ROWS):
        chunk = torch.arange(start, min(start + _CHUNK_ROWS, len(images)), device=images.device)
        by_image = scale * images[chunk] @ texts.T + shift
        is_pair = chunk[:, None] == torch.arange(len(texts), device=texts.device)
        counted = None if weights is None else torch.where(is_pair, 1.0, weights)
        if is_sigmoid:
            row_losses = -F.logsigmoid(torch.where(is_pair, by_image, -by_image))
            losses.append((row_losses if counted is None else counted * row_losses).sum(1))
        else:
            both = (by_image, scale * texts[chunk] @ images.T + shift)
            if counted is not None:
                both = (both[0] + counted.log(), both[1] + counted.log())
            of_image, of_text = (F.cross_entropy(logits, chunk, reduction="none") for logits in both)
            losses.append((of_image + of_text) / 2)
    return torch.cat(losses) if losses else images.new_zeros(0)

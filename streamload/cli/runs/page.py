"""Rows of steps as an HTML page, with the images as they were trained on; and as files."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamload.observe.report import STYLE

if TYPE_CHECKING:
    from streamload.loader.options import LoaderOptions

_ROWS_STYLE = """
.rows{display:grid;grid-template-columns:repeat(auto-fill,minmax(210px,1fr));gap:14px}.rows div{
background:var(--card);border-radius:4px;padding:10px;overflow-wrap:anywhere;font-size:13px}.rows img{
width:100%;image-rendering:auto;border-radius:3px;display:block;margin-bottom:6px}.rows p{margin:2px 0}
.soft{color:var(--soft)}
"""
_CHANNELS = 3


def pictures(images: Any, options: LoaderOptions) -> list[npt.NDArray[np.uint8] | None]:
    """The images of a batch as uint8[H, W, 3] each, by undoing the normalisation; None: it isn't an image.

    Args:
        images: a tensor or list of float or uint8[3, H, W]; None: there are none.
        options: of the loader, whose transform has the statistics. Of one that isn't known by its parts the
            result is spread over the image's own range.
    """
    statistics = _statistics(options)
    shown: list[npt.NDArray[np.uint8] | None] = []
    for image in [] if images is None else images:
        if getattr(image, "ndim", 0) != 3 or image.shape[0] != _CHANNELS:
            shown.append(None)
            continue
        pixels = np.moveaxis(image.cpu().numpy(), 0, -1)
        if pixels.dtype != np.uint8:
            pixels = pixels.astype(np.float32)
            if statistics is None:
                low, high = float(pixels.min()), float(pixels.max())
                pixels = (pixels - low) / max(high - low, 1e-9)
            else:
                pixels = pixels * np.array(statistics[1], np.float32) + np.array(statistics[0], np.float32)
            pixels = np.clip(np.nan_to_num(pixels) * 255 + 0.5, 0, 255).astype(np.uint8)
        shown.append(np.ascontiguousarray(pixels))
    return shown


def _statistics(options: LoaderOptions) -> tuple[Sequence[float], Sequence[float]] | None:
    from streamload.transforms.compile import compile_transform
    from streamload.transforms.plan import NotRecognised, clip_plan

    try:
        plan = clip_plan(True) if options.preprocess is None else compile_transform(options.preprocess)
    except NotRecognised:
        return None
    return plan.statistics


def as_png(picture: npt.NDArray[np.uint8]) -> bytes:
    """A picture as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


def page(
    title: str, subtitle: str, sections: Sequence[tuple[str, Sequence[tuple[Mapping[str, Any], Any]]]]
) -> str:
    """A page without scripts or anything from a network; all text is escaped.

    Args:
        title: of it.
        subtitle: below the title.
        sections: of it.
    """
    parts = []
    for heading, rows in sections:
        cards = "".join(_card(values, picture) for values, picture in rows)
        parts.append(f"<h2>{html.escape(heading)}</h2><section class=rows>{cards}</section>")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        f'<meta name=viewport content="width=device-width"><style>{STYLE}{_ROWS_STYLE}</style><main>'
        f"<h1>{html.escape(title)}</h1><p class=sub>{html.escape(subtitle)}</p>{''.join(parts)}</main>"
        f"</html>\n"
    )


def _card(values: Mapping[str, Any], picture: npt.NDArray[np.uint8] | None) -> str:
    shown = []
    if picture is not None:
        shown.append(f'<img alt="" src="data:image/png;base64,{base64.b64encode(as_png(picture)).decode()}">')
    if values.get("caption") is not None:
        shown.append(f"<p>{html.escape(values['caption'][:500])}")
    for name, value in values.items():
        if name != "caption" and value is not None:
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            shown.append(f"<p class=soft>{html.escape(name)}: {html.escape(text)}")
    return f"<div>{''.join(shown)}</div>"


def save(folder: Path, rows: Sequence[tuple[Mapping[str, Any], Any]]) -> None:
    """Write each row's picture as PNG, named by its number in the batch."""
    folder.mkdir(parents=True, exist_ok=True)
    for values, picture in rows:
        if picture is not None:
            (folder / f"{int(values['row']):05d}.png").write_bytes(as_png(picture))

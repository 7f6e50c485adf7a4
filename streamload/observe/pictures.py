"""Images of batches as pictures: in cells of HTML with captions and keys, as a page, and as files."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streamload.observe.charts import STYLE
from streamload.urls import redact_text

Picture = npt.NDArray[np.uint8]
"""uint8[H, W, 3]."""
Statistics = tuple[Sequence[float], Sequence[float]]
"""The mean and std of each channel, by which images were normalised."""
Row = tuple[Mapping[str, Any], Picture | None]
"""What is said of a sample by name, its caption among it, and its picture."""

_CELLS_STYLE = """
.streamload-rows{display:grid;grid-template-columns:repeat(auto-fill,minmax(210px,1fr));gap:14px;
font:13px/1.45 system-ui,sans-serif;color:inherit}.streamload-rows div{background:rgba(128,128,128,.12);
border-radius:4px;padding:10px;overflow-wrap:anywhere}.streamload-rows img{width:100%;border-radius:3px;
display:block;margin:0 0 6px}.streamload-rows p{margin:2px 0;color:inherit}.streamload-rows .soft{opacity:.75}
"""
_CHANNELS = (1, 3)
_LONGEST_SIDE = 320
_LONGEST_CAPTION = 500


def pictures(images: Any, statistics: Statistics | None) -> list[Picture | None]:
    """The images of a batch as pictures, by undoing the normalisation; None: it isn't an image.

    Args:
        images: a tensor or list of float or uint8[3, H, W] or [1, H, W], or of Pillow's; None: none.
        statistics: by which float images were normalised; None: each is spread over its own range.
    """
    shown: list[Picture | None] = []
    for image in [] if images is None else images:
        if hasattr(image, "convert"):
            shown.append(np.array(image.convert("RGB")))
            continue
        if getattr(image, "ndim", 0) != 3 or image.shape[0] not in _CHANNELS:
            shown.append(None)
            continue
        pixels = np.moveaxis(as_numbers(image), 0, -1)
        if pixels.dtype != np.uint8:
            pixels = pixels.astype(np.float32)
            if statistics is None:
                finite = pixels[np.isfinite(pixels)]
                low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
                pixels = (pixels - low) / max(high - low, 1e-9)
            else:
                pixels = pixels * np.array(statistics[1], np.float32) + np.array(statistics[0], np.float32)
            pixels = (np.nan_to_num(np.clip(pixels, 0, 1)) * 255 + 0.5).astype(np.uint8)
        shown.append(np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3))))
    return shown


def as_numbers(image: Any) -> npt.NDArray[Any]:
    """A tensor on any device, of any float type, or an array."""
    if isinstance(image, np.ndarray):
        return image
    host = image.detach().cpu()
    return np.asarray(host.float() if host.is_floating_point() else host)


def as_png(picture: Picture) -> bytes:
    """A picture as a PNG file."""
    return _encoded(picture, "PNG")


def _encoded(picture: Picture, kind: str, side: int | None = None, **options: Any) -> bytes:
    from PIL import Image

    image, file = Image.fromarray(picture), io.BytesIO()
    if side is not None:
        image.thumbnail((side, side))
    image.save(file, kind, **options)
    return file.getvalue()


def page(title: str, subtitle: str, sections: Sequence[tuple[str, Sequence[Row]]]) -> str:
    """A page without scripts or anything from a network; all text is escaped.

    Args:
        title: of it.
        subtitle: below the title.
        sections: of it.
    """
    parts = [
        f"<h2>{html.escape(heading)}</h2><section>{cells(rows, is_exact=True)}</section>"
        for heading, rows in sections
    ]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        f'<meta name=viewport content="width=device-width"><style>{STYLE}</style><main>'
        f"<h1>{html.escape(title)}</h1><p class=sub>{html.escape(subtitle)}</p>{''.join(parts)}</main>"
        f"</html>\n"
    )


def cells(rows: Iterable[Row], *, is_exact: bool = False) -> str:
    """Rows as a grid of cells in the colours of the page or notebook that they are put into.

    Args:
        rows: of a batch.
        is_exact: pictures are PNG in their own size, not smaller ones with a tenth of the bytes.
    """
    drawn = "".join(_cell(values, picture, is_exact) for values, picture in rows)
    return f'<style>{_CELLS_STYLE}</style><div class="streamload-rows">{drawn}</div>'


def _cell(values: Mapping[str, Any], picture: Picture | None, is_exact: bool) -> str:
    shown = []
    if picture is not None:
        kind = "png" if is_exact else "jpeg"
        file = as_png(picture) if is_exact else _encoded(picture, "JPEG", _LONGEST_SIDE, quality=88)
        shown.append(f'<img alt="" src="data:image/{kind};base64,{base64.b64encode(file).decode()}">')
    if values.get("caption") is not None:
        shown.append(f"<p>{html.escape(values['caption'][:_LONGEST_CAPTION])}")
    for name, value in values.items():
        if name != "caption" and value is not None:
            text = f"{value:.4g}" if isinstance(value, float) else redact_text(str(value))
            shown.append(f"<p class=soft>{html.escape(name)}: {html.escape(text)}")
    return f"<div>{''.join(shown)}</div>"


def save(folder: Path, rows: Sequence[Row]) -> None:
    """Write each row's picture as PNG, named by its number in the batch."""
    folder.mkdir(parents=True, exist_ok=True)
    for values, picture in rows:
        if picture is not None:
            (folder / f"{int(values['row']):05d}.png").write_bytes(as_png(picture))

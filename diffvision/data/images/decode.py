"""Bytes of a member -> image, caption or label, or a `BadSample` with the reason.

Only these are decoded: three image formats, UTF-8 text, JSON, integers. Nothing is ever unpickled, and sizes are
bounded before anything is decoded.
"""

import codecs
import html
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import Any, TypeGuard

import numpy as np
from PIL import Image, ImageOps

from diffvision.data.shards.index import MEMBER_TYPES
from diffvision.data.shards.sample import BadSample

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 64_000_000
MAX_ELONGATION = 5000
"""Longer side by shorter. Resized to 224 on the shorter side, an image takes some 50,000 pixels for each unit of this:
without a bound, a few hundred bytes could ask for hundreds of gigabytes."""
MAX_SCANS = 500
"""Of a JPEG: progressive ones have about ten. Each goes over the whole image: a megabyte of them takes minutes."""
MAX_IMAGE_BYTES = MEMBER_TYPES["jpg"]
MAX_CAPTION = 8000
"""Characters: some 1,600 tokens."""
MAX_WORD = 1000
"""Characters of a caption between two spaces: byte-pair encoding takes quadratic time on one endless word."""
MAX_JSON_BYTES = 1 << 20
_PIXELS_AT_A_TIME = 1 << 18  # pixels rescaled at a time: all at once, the largest image would take 2 GB
BACKGROUND = (255, 255, 255)
"""What shows through where an image is transparent: white."""


def decode_image(data: bytes) -> Image.Image:
    """Decode a JPEG, PNG or WebP to an upright 8-bit RGB image; of an animation, its first frame.

    Transparent parts show white, 16-bit and floating grey is rescaled rather than clipped, EXIF orientation is applied.
    """
    with translate_errors():
        image = open_image(data)
        image.load()
        with suppress(Exception):  # unreadable EXIF gives no orientation
            ImageOps.exif_transpose(image, in_place=True)
        return to_rgb(image)


def open_image(data: bytes) -> Image.Image:
    """Open an image and check format and size from its header, without decoding pixels."""
    if not data:
        raise BadSample("empty image")
    if len(data) > MAX_IMAGE_BYTES:
        raise BadSample("image too large")
    with translate_errors():
        image = Image.open(BytesIO(data), formats=IMAGE_FORMATS)
    if image.format != "PNG" and data.count(b"\xff\xda") > MAX_SCANS:
        raise BadSample("too many scans")
    if image.width * image.height > MAX_PIXELS:
        raise BadSample("image too large")
    if max(image.size) > MAX_ELONGATION * min(image.size):
        raise BadSample("image too elongated")
    return image


def check_processed(size: tuple[int, int], *, pads: bool, shortest_edge: int | None = None) -> None:
    """Raise BadSample where an image of width and height would take more than `MAX_PIXELS` on its way to a model.

    Args:
        size: width and height.
        pads: it is padded to a square first.
        shortest_edge: what its shorter side is resized to, with the longer one in proportion; None for fixed sizes.
    """
    longer, shorter = max(size), min(size)
    if pads:
        needed = longer**2
    else:
        needed = 0 if shortest_edge is None else shortest_edge**2 * longer // shorter
    if needed > MAX_PIXELS:
        raise BadSample("image too elongated")


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise what PIL raises as a `BadSample`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL's, about damaged EXIF, palettes, and sizes, which are checked here
            yield
    except BadSample:
        raise
    except Image.UnidentifiedImageError:
        raise BadSample("not a JPEG, PNG or WebP image") from None
    except Image.DecompressionBombError:
        raise BadSample("image too large") from None
    except Exception as error:  # PIL's decoders raise nearly anything on damaged data
        raise BadSample("truncated image" if "truncated" in str(error) else "damaged image") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any PIL image to 8-bit RGB, see `decode_image`."""
    if image.mode.startswith("I") or image.mode == "F":
        return _rescale(image).convert("RGB")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        layered = image.convert("RGBA")
        flat = Image.new("RGB", image.size, BACKGROUND)
        flat.paste(layered, mask=layered.getchannel("A"))
        return flat
    return image if image.mode == "RGB" else image.convert("RGB")


def _rescale(image: Image.Image) -> Image.Image:
    """Rescale grey of more than 8 bits to 8: from 0..65535 for integers in it, else from the image's range."""
    values = np.asarray(image)
    low, high = 0.0, 65535.0
    if image.mode == "F" or values.min() < low or values.max() > high:
        finite = values[np.isfinite(values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    scaled = np.empty(values.shape, np.uint8)
    rows = max(1, _PIXELS_AT_A_TIME // image.width)
    for top in range(0, image.height, rows):
        part = np.nan_to_num(values[top : top + rows].astype(np.float64), nan=low, posinf=high, neginf=low)
        scaled[top : top + rows] = np.rint(((part - low) * (255.0 / max(high - low, 1e-12))).clip(0, 255))
    return Image.fromarray(scaled, mode="L")


def decode_text(data: bytes, *, cut: bool = False) -> str:
    """Decode UTF-8 text; with `cut` the bytes may end in the middle of a character."""
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=not cut)
    except UnicodeDecodeError:
        raise BadSample("caption not UTF-8") from None
    return text.replace("\0", " ")


def clean_caption(text: str) -> str:
    """Return one caption, bounded and stripped, with the tokenizers' special tokens made plain text.

    Raises:
        BadSample: a tokenizer would keep none of it, or it is no Unicode text (half a surrogate pair).
        TypeError: it is no text.
    """
    if not isinstance(text, str):
        raise TypeError(f"a caption is {type(text).__name__}, not text: write it as text ({text!r:.40})")
    caption = _ENDLESS.sub(r"\1", text.strip()[:MAX_CAPTION])
    plain = caption
    for _ in range(3):  # HTML escapes can hide a special token, and can be nested
        if "&" not in plain:
            break
        plain = html.unescape(plain)
    if _SPECIAL_TOKENS.search(plain):
        caption = _SPECIAL_TOKENS.sub(r"\1", plain).strip()
    if not _VISIBLE.search(html.unescape(caption)):
        raise BadSample("empty caption")
    if _HALF_PAIR.search(caption):
        raise BadSample("caption not UTF-8")
    return caption


def is_blank(text: str) -> bool:
    """Return whether a text has only what a tokenizer drops: spaces, also as `&nbsp;`, and control characters."""
    return not _VISIBLE.search(html.unescape(text))


_VISIBLE = re.compile(r"[^\s\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]")
_ENDLESS = re.compile(rf"(?<!\S)(\S{{{MAX_WORD}}})\S+")
_HALF_PAIR = re.compile(r"[\ud800-\udfff]")
_SPECIAL_TOKENS = re.compile(r"<(start_of_text|end_of_text|\|startoftext\||\|endoftext\|)>", re.IGNORECASE)


def json_record(data: bytes) -> dict[str, Any]:
    """Decode a JSON object; return an empty one for any other JSON value.

    Raises:
        BadSample: the JSON is damaged.
    """
    if len(data) > MAX_JSON_BYTES:
        raise BadSample("JSON too large")
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        raise BadSample("damaged JSON") from None
    return record if isinstance(record, dict) else {}


def json_field(data: bytes, field: str) -> str | list[str]:
    """Return the caption, or list of captions, in a field of a JSON object."""
    value = json_record(data).get(field)
    if not is_caption(value):
        raise BadSample(f"no caption in JSON field {field!r}")
    return value


def is_caption(value: Any) -> TypeGuard[str | list[str]]:
    """Return whether a value of JSON is a caption or a list of captions."""
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(v, str) for v in value) and value != []
    )


def json_label(data: bytes, field: str) -> int:
    """Return the class number in a field of a JSON object, a whole number or digits in a string."""
    value = json_record(data).get(field)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise BadSample(f"no class number in JSON field {field!r}")
    return decode_label(value.encode())


def decode_label(data: bytes) -> int:
    """Decode a class number written in decimal."""
    if not data.strip().isdigit() or len(data) > 16:
        raise BadSample("label is not a class number")
    return int(data)

"""Group D: what calls itself an image. Each is one sample among good ones, in a process with bounded memory."""

from __future__ import annotations

import io
import resource
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import webdataset
from PIL import Image

from battery.case import Seen, case, stock
from diffvision.data import ImageLabel, ImageMember, Limits, ShardLoader, ShardSet
from diffvision.data.images.module import to_float
from diffvision.data.shards.writer import write_tar

CEILING = 1 << 30
"""Bytes that decoding may add to a process: an image of 64 million pixels, the most that is let in, has 0.2 GB."""


def encoded(image: Image.Image, form: str = "PNG", **settings: object) -> bytes:
    data = io.BytesIO()
    image.save(data, form, **settings)
    return data.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def huge(side: int) -> bytes:
    """A PNG of side x side pixels, all black and well compressed: a whole image."""
    header = side.to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    row, packer = bytes(1 + (side + 7) // 8), zlib.compressobj(9)
    rows = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def text_bomb() -> bytes:
    image = encoded(Image.new("RGB", (2, 2)))
    return image[:33] + chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(80 << 20))) + image[33:]


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(Image.new("RGB", (4, 2)), "JPEG", exif=exif)


def frames(form: str) -> bytes:
    own = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    return encoded(own[0], form, save_all=True, append_images=own[1:], lossless=True)


def palette() -> bytes:
    image = Image.new("P", (2, 2), 1)
    image.putpalette([200, 10, 10, 10, 10, 200])
    return encoded(image, transparency=1)


def ramp() -> bytes:
    return encoded(Image.fromarray(np.linspace(0, 65535, 256, dtype=np.uint16).reshape(16, 16)))


NONE = "not a JPEG, PNG or WebP image"
_noise = partial(Image.effect_noise, (64, 64), 50)
BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "zero bytes": (bytes, "empty image"),
    "one byte": (lambda: b"\xff", NONE),
    "text": (lambda: b"just text", NONE),
    "cut JPEG": (lambda: encoded(_noise(), "JPEG")[:900], "truncated image"),
    "cut PNG": (lambda: encoded(_noise())[:900], "truncated image"),
    "0 x 0": (lambda: huge(0), NONE),
    "EPS named .jpg": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", NONE),
    "PDF named .jpg": (lambda: encoded(Image.new("RGB", (4, 4)), "PDF"), NONE),
    "TIFF named .jpg": (lambda: encoded(Image.new("RGB", (4, 4)), "TIFF"), NONE),
    "more pixels than the limit": (partial(huge, 9000), "image too large"),
    "12,000 x 12,000": (partial(huge, 12_000), "image too large"),
    "300,000 x 1": (lambda: encoded(Image.new("L", (300_000, 1))), "image too elongated"),
    "text bomb in a PNG": (text_bomb, "damaged image"),
}
WHITE, GREY = (255, 255, 255), (128, 128, 128)
GOOD: dict[str, tuple[Callable[[], bytes], tuple[int, ...] | str]] = {
    "CMYK": (lambda: encoded(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG"), WHITE),
    "L": (lambda: encoded(Image.new("L", (2, 2), 128)), GREY),
    "LA, transparent": (lambda: encoded(Image.new("LA", (2, 2), (0, 0))), WHITE),
    "RGBA, half transparent": (lambda: encoded(Image.new("RGBA", (2, 2), (0, 0, 0, 128))), (127, 127, 127)),
    "palette with transparency": (palette, WHITE),
    "1 bit": (lambda: encoded(Image.new("1", (2, 2), 1)), WHITE),
    "16 bit": (lambda: encoded(Image.new("I;16", (2, 2), 32896)), GREY),
    "16-bit ramp": (ramp, "mean 127.5"),
    "animated PNG": (partial(frames, "PNG"), (255, 0, 0)),
    "animated WebP": (partial(frames, "WEBP"), (255, 0, 0)),
    "EXIF orientation": (turned, "2 x 4"),
    "1 x 1": (lambda: encoded(Image.new("RGB", (1, 1), GREY)), GREY),
    "1 x 5000": (lambda: encoded(Image.new("RGB", (1, 5000), GREY)), GREY),
}


def described(image: torch.Tensor) -> torch.Tensor:
    """[first pixel's colours, width, height, mean], each 0..255 or pixels, so that images of all sizes make a batch."""
    levels = image * 255
    numbers = [*levels[:, 0, 0].round().tolist(), image.shape[2], image.shape[1], float(levels.mean())]
    return torch.tensor(numbers)


def among_good(data: bytes) -> list[dict]:
    good = encoded(Image.new("RGB", (4, 4), (1, 2, 3)))
    return [{"__key__": f"{n}", "jpg": data if n == 3 else good, "cls": str(int(n == 3))} for n in range(8)]


def read(name: str) -> tuple[ShardLoader, list[list[float]]]:
    """The loader after an epoch, and what became of the image if it was taken."""
    make = (BAD | GOOD)[name][0]
    write_tar(Path("0.tar"), among_good(make()))
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + CEILING, -1))
    kind = ImageLabel(ImageMember(lambda image: described(to_float(image))))
    data = ShardLoader(ShardSet("0.tar"), kind, 4, num_workers=0, limits=Limits(1.0))
    found = [row.tolist() for batch in data for row in batch["image"][batch["label"] == 1]]
    assert data.report.seen + data.report.bad == 8
    return data, found


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def refused(name: str) -> Seen:
    data, found = read(name)
    assert not found
    assert data.report.skipped == {BAD[name][1]: 1}, data.report.summary()
    return Seen(f"counted: {BAD[name][1]}; 7 others seen", lost=0)


def taken(name: str) -> Seen:
    data, (found,) = read(name)
    assert data.report.bad == 0, data.report.summary()
    *colour, width, height, mean = found
    seen = {"EXIF orientation": f"{width:.0f} x {height:.0f}", "16-bit ramp": f"mean {mean:.1f}"}.get(
        name, tuple(colour)
    )
    assert seen == GOOD[name][1], f"{seen}, not {GOOD[name][1]}"
    return Seen(f"RGB, {seen}", lost=0)


def plain(name: str) -> str:
    """webdataset's decoder on the same image."""
    expected = GOOD[name][1] if name in GOOD else ""
    write_tar(Path("0.tar"), among_good((BAD | GOOD)[name][0]()))
    told: list[BaseException] = []

    def skip(error: BaseException) -> bool:
        told.append(error)
        return True

    samples = list(webdataset.WebDataset("0.tar", shardshuffle=False).decode("pilrgb", handler=skip, only=["jpg"]))
    images = [sample["jpg"] for sample in samples if sample["cls"] == b"1"]
    if name in BAD:
        assert told, f"taken for an image of {images[0].size}"
        return f"an error: {type(told[0]).__name__}"
    pixel, size = images[0].getpixel((0, 0)), images[0].size
    mean = float(np.asarray(images[0]).mean())
    seen = {"EXIF orientation": f"{size[0]} x {size[1]}", "16-bit ramp": f"mean {mean:.1f}"}.get(name, pixel)
    assert seen == expected, f"{seen}, not {expected}"
    return f"{seen}"


for _number, _name in enumerate(BAD):
    case(f"D1 {_name}", "counted by reason", kind="input", quick=_number % 12 == 0)(partial(refused, _name))
    stock(f"D1 {_name}")(partial(plain, _name))
for _number, _name in enumerate(GOOD):
    case(f"D2 {_name}", f"RGB, {GOOD[_name][1]}", kind="input", quick=_number % 12 == 0)(partial(taken, _name))
    stock(f"D2 {_name}")(partial(plain, _name))

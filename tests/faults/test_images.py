"""Images that would take more memory than a worker has: refused by their header, in bounded memory."""

import io
import resource
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from diffvision.data import ImageLabel, ImageMember, Limits, ShardLoader, ShardSet
from diffvision.data.images.image_data import to_float
from diffvision.data.shards.writer import write_tar
from ranks import alone

pytestmark = [pytest.mark.faults, pytest.mark.forks]
# Bytes that decoding may add to a process. An image of 64 million pixels, the most that is let in, has 0.2 GB.
CEILING = 1 << 30


def encoded(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def square(side: int) -> bytes:
    """Return a whole PNG of side x side black pixels, well compressed."""
    header = side.to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    row, packer = bytes(1 + (side + 7) // 8), zlib.compressobj(9)
    rows = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def text_bomb() -> bytes:
    image = encoded(Image.new("RGB", (2, 2)))
    return image[:33] + chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(80 << 20))) + image[33:]


LARGE: dict[str, tuple[Callable[[], bytes], str]] = {
    "9,000 x 9,000": (partial(square, 9000), "image too large"),
    "12,000 x 12,000": (partial(square, 12_000), "image too large"),
    "300,000 x 1": (lambda: encoded(Image.new("L", (300_000, 1))), "image too elongated"),
    "text bomb in a PNG": (text_bomb, "damaged image"),
}


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@pytest.mark.parametrize("what", LARGE)
def test_an_image_that_is_too_large_is_counted_and_takes_no_memory(what):
    make, reason = LARGE[what]
    good, data = encoded(Image.new("RGB", (4, 4))), make()
    write_tar(Path("0.tar"), [{"__key__": f"{n}", "png": data if n == 3 else good, "cls": "0"} for n in range(8)])

    def read() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + CEILING, -1))
        kind = ImageLabel(ImageMember(to_float))
        loader = ShardLoader(ShardSet("0.tar"), kind, 4, num_workers=0, limits=Limits(1.0))
        for _ in loader:
            pass
        assert loader.report.seen == 7
        assert loader.report.skipped == {reason: 1}, loader.report.summary()

    ended = alone(read)
    assert ended.code == 0, ended.output

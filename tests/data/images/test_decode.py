import html
import zlib
from functools import partial

import numpy as np
import pytest
from PIL import Image

from diffvision.data.images.decode import clean_caption, decode_image, decode_label, decode_text, json_field, to_rgb
from diffvision.data.shards.sample import BadSample
from tests.data.conftest import encode


def pixel(data, at=(0, 0)):
    image = decode_image(data)
    assert image.mode == "RGB"
    return image.getpixel(at)


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("RGB", (10, 20, 30), (10, 20, 30)),
        ("L", 77, (77, 77, 77)),
        ("1", 1, (255, 255, 255)),
        ("LA", (40, 255), (40, 40, 40)),
        ("LA", (40, 0), (255, 255, 255)),
        ("RGBA", (10, 20, 30, 255), (10, 20, 30)),
        ("RGBA", (10, 20, 30, 0), (255, 255, 255)),  # transparent shows white
        ("RGBA", (0, 0, 0, 128), (127, 127, 127)),
        ("I;16", 65535, (255, 255, 255)),
        ("I;16", 32896, (128, 128, 128)),  # not clipped to white
        ("I;16", 257, (1, 1, 1)),
    ],
)
def test_png_of_every_mode(mode, colour, expected):
    assert pixel(encode(Image.new(mode, (3, 2), colour))) == expected


def test_palette_with_and_without_transparency():
    image = Image.new("P", (2, 1))
    image.putpalette([200, 10, 10, 10, 10, 200])
    image.putpixel((1, 0), 1)
    assert pixel(encode(image)) == (200, 10, 10)
    assert pixel(encode(image, transparency=1), at=(1, 0)) == (255, 255, 255)
    assert pixel(encode(Image.new("RGB", (1, 1), (5, 6, 7)), transparency=(5, 6, 7))) == (255, 255, 255)


def test_cmyk_jpeg():
    red = pixel(encode(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=95))
    assert red[0] > 245
    assert max(red[1:]) < 10


@pytest.mark.parametrize("mode", ["I", "F"])
def test_wider_grey_is_rescaled_by_its_range(mode):
    values = np.array([[-1000.0, 0.0, 1000.0]]).astype(np.int32 if mode == "I" else np.float32)
    assert np.asarray(to_rgb(Image.fromarray(values)))[0, :, 0].tolist() == [0, 128, 255]
    flat = Image.fromarray(np.full((1, 1), np.nan, np.float32)) if mode == "F" else Image.new("I", (1, 1), 0)
    assert to_rgb(flat).getpixel((0, 0)) == (0, 0, 0)


def test_exif_orientation_is_applied_and_broken_exif_ignored():
    image = Image.new("RGB", (4, 2))
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode_image(encode(image, "JPEG", exif=exif)).size == (2, 4)
    assert decode_image(encode(image, "JPEG", exif=b"Exif\0\0MM nonsense")).size == (4, 2)


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_first_frame_of_an_animation(form):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    data = encode(frames[0], form, save_all=True, append_images=frames[1:], lossless=True)
    assert pixel(data) == (255, 0, 0)


@pytest.mark.parametrize("size", [(1, 1), (1, 5000)])
def test_thin_images_are_images(size):
    assert decode_image(encode(Image.new("RGB", size))).size == size


def huge_png(side):
    """A valid header that asks for side x side pixels, and hardly any data after it."""

    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def text_bomb():
    image = encode(Image.new("RGB", (2, 2)))
    text = b"k\0\0" + zlib.compress(bytes(80 << 20))
    chunk = len(text).to_bytes(4, "big") + b"zTXt" + text + zlib.crc32(b"zTXt" + text).to_bytes(4, "big")
    return image[:33] + chunk + image[33:]


NO_IMAGE = "not a JPEG, PNG or WebP image"
BAD = {
    "empty": (b"", "empty image"),
    "text": (b"just text", NO_IMAGE),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", NO_IMAGE),
    "gif": (encode(Image.new("RGB", (9, 9)), "GIF"), NO_IMAGE),
    "0x0": (huge_png(0), NO_IMAGE),
    "cut-jpeg": (encode(Image.effect_noise((64, 64), 50), "JPEG")[:900], "truncated image"),
    "cut-png": (encode(Image.effect_noise((64, 64), 50), "PNG")[:900], "truncated image"),
    "large": (huge_png(9000), "image too large"),  # more than our limit
    "larger": (huge_png(12_000), "image too large"),  # PIL warns
    "largest": (huge_png(40_000), "image too large"),  # PIL refuses
    "wide": (encode(Image.new("L", (300_000, 1))), "image too elongated"),
    "high": (encode(Image.new("L", (2, 10_001))), "image too elongated"),
    "text-bomb": (text_bomb(), "damaged image"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_images_have_their_reason(kind):
    data, reason = BAD[kind]
    with pytest.raises(BadSample) as error:
        decode_image(data)
    assert str(error.value) == reason


def test_flipped_bits_of_a_png_are_noticed():
    data = bytearray(encode(Image.effect_noise((32, 32), 50)))
    data[200] ^= 0xFF
    with pytest.raises(BadSample):
        decode_image(bytes(data))


def test_captions_are_stripped_and_cut():
    assert clean_caption("  a cat \n") == "a cat"
    assert clean_caption("x" * 1_000_000) == "x" * 1000


@pytest.mark.parametrize("caption", ["a <end_of_text> b", "a <START_OF_TEXT> b", "<end_of_text>"])
@pytest.mark.parametrize("escapes", range(3))
def test_special_tokens_of_tokenizers_become_words(caption, escapes):
    for _ in range(escapes):
        caption = html.escape(caption)
    cleaned = clean_caption(caption)
    for _ in range(3):
        assert "<" not in cleaned
        cleaned = html.unescape(cleaned)
    assert clean_caption("fish &amp; chips <3") == "fish &amp; chips <3"


def test_text_json_and_labels():
    assert decode_text("naïve".encode()[:3], cut=True) == "na"
    assert decode_text(b"\xef\xbb\xbfmark\0") == "mark "
    assert json_field(b'{"caption": "a cat"}', "caption") == "a cat"
    assert json_field(b'{"caption": ["a", "b"]}', "caption") == ["a", "b"]
    assert decode_label(b" 12\n") == 12


LABELS = [b"", b"cat", b"1.5", b"-1", b"9" * 30, b" " * 100 + b"3"]
FIELDS = [b"{}", b"[]", b'{"caption": 3}', b'{"caption": []}', b'{"caption": null}', b'{"caption": ["a", 1]}']


@pytest.mark.parametrize(
    ("decode", "cases", "reason"),
    [
        (decode_text, [b"\xff\xfe", "naïve".encode()[:3], b"\xed\xa0\x80"], "caption not UTF-8"),
        (partial(json_field, field="caption"), FIELDS, "no caption in JSON field"),
        (partial(json_field, field="caption"), [b"", b"{", b"\xff", b"[" * 100_000], "damaged JSON"),
        (decode_label, LABELS, "label"),
    ],
    ids=["text", "field", "JSON", "label"],
)
def test_bad_text_json_and_labels(decode, cases, reason):
    for data in cases:
        with pytest.raises(BadSample, match=reason):
            decode(data)


def test_scans_without_end_are_not_decoded():
    """Each goes over the whole image: a hundred kilobytes of them take half a minute at 64 million pixels."""
    data = encode(Image.new("L", (64, 64)), "JPEG", progressive=True)
    table = data.rindex(b"\xff\xc4")
    assert decode_image(data[:-2] + data[table:-2] * 20 + data[-2:]).size == (64, 64)
    with pytest.raises(BadSample, match="too many scans"):
        decode_image(data[:-2] + data[table:-2] * 1000 + data[-2:])

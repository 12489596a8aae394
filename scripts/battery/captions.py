"""Group E: captions. Each is one sample among good ones; what comes out is CLIP's tokens."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import open_clip
import torch

from battery.case import Seen, case, stock
from battery.small import raised
from diffvision.data import CaptionMember, ImageMember, ImageText, Limits, ShardLoader, ShardSet
from diffvision.data.images.captions import CACHED_WORDS, text_only
from diffvision.data.images.decode import clean_caption
from diffvision.data.images.module import to_float
from diffvision.data.made.digits import png
from diffvision.data.shards.writer import write_tar

EMPTY, NO_TEXT = "empty caption", "caption not UTF-8"
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", EMPTY),
    "blanks": (b" \t\n ", EMPTY),
    "blanks as HTML": (b"&nbsp;&#160;", EMPTY),
    "control characters": (b"\x01\x02", EMPTY),
    "not UTF-8": (b"a \xff\xfe cat", NO_TEXT),
    "surrogate in UTF-8": (b"a \xed\xa0\x80 cat", NO_TEXT),
}
GOOD: dict[str, str] = {
    "a megabyte of words": "a red cat " * 100_000,
    "one word of 16,000 letters": "x" * 16_000,
    "NUL": "a\0cat",
    "bidi override": "a\u202etac",
    "zero width": "a\u200bcat",
    "right to left": "שלום عالم",
    "joined emoji": "👩‍👩‍👧 at home",
    "combining marks": "e" + "\u0301" * 300,
    "<end_of_text>": "a <end_of_text> cat",
    "<end_of_text> in HTML": "a &lt;end_of_text&gt; cat",
    "<start_of_text> in HTML": "a &lt;start_of_text&gt; cat",
    "<end_of_text> in six layers of HTML": "a &amp;amp;amp;amp;amp;lt;end_of_text&amp;amp;amp;amp;amp;gt; cat",
    "<end_of_text> in full width": "a ＜end_of_text＞ cat",
    "<end_of_text> with a control character": "a <end_\x01of_text> cat",
}
JSON: dict[str, object] = {"None": None, "a number": 3, "a list of numbers": [1, 2], "nothing": []}


def epoch(member: str, content: bytes) -> tuple[ShardLoader, list[torch.Tensor]]:
    """The loader after an epoch, and the tokens of the captions that were taken for good and are not "a dog"."""
    import numpy as np

    image, good = png(np.zeros((2, 2, 3))), json.dumps({"caption": "a dog"}).encode() if member != "txt" else b"a dog"
    key = member.partition(":")[0]
    write_tar(Path("0.tar"), [{"__key__": f"{n}", "png": image, key: content if n == 3 else good} for n in range(8)])
    kind = ImageText(ImageMember(to_float), CaptionMember(member), open_clip.get_tokenizer("ViT-B-32"))
    data = ShardLoader(ShardSet("0.tar"), kind, 4, num_workers=0, limits=Limits(1.0))
    dog = kind.tokenizer(["a dog"])[0]
    rows = [row for batch in data for row in batch["text"] if not torch.equal(row, dog)]
    assert data.report.seen + data.report.bad == 8
    return data, rows


def check(row: torch.Tensor) -> None:
    """77 tokens, one start, one end, nothing behind it."""
    start, end = 49406, 49407
    ids = row.tolist()
    assert len(ids) == 77, f"{len(ids)} tokens"
    assert ids.count(end) == 1, f"{ids.count(end)} ends"
    assert ids.count(start) == 1, f"{ids.count(start)} starts"
    assert ids[0] == start
    assert not any(ids[ids.index(end) + 1 :])
    assert ids.index(end) > 1, "no words"


def refused(member: str, content: bytes, reason: str) -> Seen:
    data, rows = epoch(member, content)
    assert not rows
    assert data.report.skipped == {reason: 1}, data.report.summary()
    return Seen(f"counted: {reason}", lost=0)


def taken(name: str) -> Seen:
    start = time.perf_counter()
    data, (row,) = epoch("txt", GOOD[name].encode())
    assert data.report.bad == 0, data.report.summary()
    check(row)
    assert time.perf_counter() - start < 2
    return Seen(f"{int((row > 0).sum())} tokens, one end", lost=0)


def plain(text: str) -> str:
    """OpenCLIP's tokenizer on the same caption."""
    start = time.perf_counter()
    (row,) = open_clip.get_tokenizer("ViT-B-32")([text])
    seconds = time.perf_counter() - start
    check(row)
    assert seconds < 2, f"{seconds:.1f} s"
    return f"{int((row > 0).sum())} tokens, one end"


for _name, (_content, _reason) in BAD.items():
    case(f"E1 {_name}", "counted by reason", kind="input")(partial(refused, "txt", _content, _reason))
    stock(f"E1 {_name}")(partial(plain, _content.decode("utf-8", "replace")))
for _name, _value in JSON.items():
    _content = json.dumps({"caption": _value}).encode()
    _run = partial(refused, "json:caption", _content, "no caption in JSON field 'caption'")
    case(f"E2 {_name} in JSON", "counted by reason", kind="input")(_run)
case("E2 half a surrogate pair in JSON", "counted by reason", kind="input")(
    partial(refused, "json:caption", rb'{"caption": "a \ud800 cat"}', NO_TEXT)
)
for _name, _text in GOOD.items():
    case(f"E3 {_name}", "77 tokens, one end", kind="input", quick=_name == "<end_of_text> in full width")(
        partial(taken, _name)
    )
    stock(f"E3 {_name}")(partial(plain, _text))


@case("E4 bytes instead of text", "a typed error", kind="input")
def typed() -> str:
    return raised(lambda: clean_caption(b"a cat"), "a caption is text, not bytes")  # type: ignore[arg-type]


def _words(tokenizer: object) -> int:
    captions = [" ".join(f"w{n}x{n % 7}abc" for n in range(first, first + 8)) for first in range(0, 8 * 12_000, 8)]
    for caption in captions:
        tokenizer.encode(caption)  # type: ignore[attr-defined]
    return len(tokenizer.cache)  # type: ignore[attr-defined]


@case("E4 words without end", "the tokenizer's cache is bounded", kind="input")
def words() -> str:
    tokenizer = text_only(open_clip.get_tokenizer("ViT-B-32"))
    tokenizer.cache._limit = 1000
    kept = _words(tokenizer)
    assert kept <= 1000
    return f"{kept} words kept at a limit of 1,000 (it is {CACHED_WORDS:,})"

"""Group C: shards that are cut, changed, missing, of another kind, or not as even as ranks would like."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import webdataset
from PIL import Image

from battery.case import Seen, case, none_left, stock
from battery.small import raised
from diffvision.data import BadDataError, CaptionMember, ImageMember, ImageText, Limits, ShardLoader, ShardSet
from diffvision.data.check import check_shards
from diffvision.data.images.module import to_float
from diffvision.data.shards.cache import ShardCache
from diffvision.data.shards.index import shard_index
from diffvision.data.shards.writer import write_manifest, write_tar

SHARDS, EACH, HURT = 4, 16, 1
LENIENT = Limits(max_bad_fraction=1.0)


def made(shards: int = SHARDS, each: int = EACH, change: Callable[[dict], dict] = dict) -> Path:
    """Shards whose keys are the same in each, as datasets often have it; image and caption say the sample's number."""
    directory = Path("shards")
    directory.mkdir()
    for shard in range(shards):
        rows = [change(numbered(shard * each + row) | {"__key__": f"{row:03d}"}) for row in range(each)]
        write_tar(directory / f"{shard}.tar", [{k: v for k, v in row.items() if v is not None} for row in rows])
    write_manifest(directory)
    return directory


def numbered(number: int) -> dict:
    """Sample `number`: an image of that grey, and a caption with it."""
    data = io.BytesIO()
    Image.new("RGB", (8, 8), (number,) * 3).save(data, "PNG")
    return {"__key__": f"{number:03d}", "cls": "0", "png": data.getvalue(), "txt": str(number)}


def numbers(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[int(caption)] for caption in captions])


def loader(source: object = "shards", batch: int = 8, **settings: object) -> ShardLoader:
    kind = ImageText(ImageMember(to_float), CaptionMember(), numbers)
    shards = ShardSet(source, ShardCache("cache"))  # type: ignore[arg-type]
    return ShardLoader(shards, kind, batch, **{"num_workers": 0, "limits": LENIENT} | settings)  # type: ignore[arg-type]


def epoch(data: ShardLoader) -> list[int]:
    """The numbers seen; AssertionError for a wrong pair, or an account that does not add up."""
    seen: list[int] = []
    for batch in data:
        drawn = (batch["image"][:, 0, 0, 0] * 255).round().long().tolist()
        written = batch["text"][:, 0].tolist()
        assert drawn == written, f"wrong pairs: {drawn} with {written}"
        seen += written
    report = data.report
    assert report.seen + report.bad + report.tail == report.total == len(data.shards), report.summary()
    return seen


def counted(data: ShardLoader, **expected: int) -> Seen:
    """An epoch of damaged data: what was seen is right, what was not is counted; substitutes are not losses."""
    seen = epoch(data)
    wanted = {reason.replace("_", " "): number for reason, number in expected.items()}
    found: dict[str, int] = {}
    for reason, number in data.report.skipped.items():
        short = reason.partition(" (")[0].partition(":")[0]
        found[short] = found.get(short, 0) + number
    assert found == wanted, f"counted {found}, not {wanted}"
    missing = data.report.total - len(set(seen)) - data.report.bad - data.report.tail
    return Seen(f"{data.report.seen} seen, {found or 'none'} skipped, pairs right", lost=missing)


def plain() -> Seen:
    """webdataset's own reader over the same shards, its errors noted: it may lose samples, but not without a word."""
    told: list[BaseException] = []

    def skip(error: BaseException) -> bool:
        told.append(error)
        return True

    urls = [str(path) for path in sorted(Path("shards").iterdir()) if path.name.endswith((".tar", ".gz"))]
    data = webdataset.WebDataset(urls, shardshuffle=False, handler=skip, empty_check=False)
    seen, wrong = [], 0
    for sample in data.decode("pil", handler=skip):
        if "png" not in sample or "txt" not in sample:
            continue
        drawn = sample["png"].getpixel((0, 0))[0]
        wrong += str(drawn) != sample["txt"]
        seen.append(int(sample["txt"]) if sample["txt"].isdigit() else -1)
    lost = none_left(seen, list(range(SHARDS * EACH)))
    words = f"{len(seen)} seen of {SHARDS * EACH}, {wrong} wrong pairs, {len(told)} errors told"
    assert not wrong, words
    assert told or not lost, f"{words}: samples lost without a word"
    return Seen(words, lost=lost)


def cut(keep: Callable[[bytes], int]) -> None:
    path = Path(f"shards/{HURT}.tar")
    data = path.read_bytes()
    path.write_bytes(data[: keep(data)])


def flip(find: bytes, at: int) -> None:
    path = Path(f"shards/{HURT}.tar")
    data = bytearray(path.read_bytes())
    data[data.index(find) + at] ^= 1
    path.write_bytes(data)


def replaced(content: bytes) -> None:
    Path(f"shards/{HURT}.tar").write_bytes(content)


def _place(data: bytes, name: bytes) -> int:
    return data.index(name)


DAMAGE: dict[str, tuple[Callable[[], None], dict[str, int]]] = {
    "cut in an image": (
        partial(cut, lambda d: _place(d, b"005.png") + 600),
        {"truncated_shard": EACH - 6, "missing_caption": 1},
    ),
    "cut in a later header": (
        partial(cut, lambda d: _place(d, b"005.txt") + 100),
        {"truncated_shard": EACH - 6, "missing_caption": 1},
    ),
    "cut between members": (
        partial(cut, lambda d: _place(d, b"005.txt")),
        {"truncated_shard": EACH - 6, "missing_caption": 1},
    ),
    "cut between samples": (partial(cut, lambda d: _place(d, b"005.cls")), {"truncated_shard": EACH - 5}),
    "cut in the first header": (partial(cut, lambda d: 100), {"truncated_shard": EACH}),
    "zero bytes": (partial(replaced, b""), {"truncated_shard": EACH}),
    "a web page of that name": (partial(replaced, b"<html>404 not found</html>"), {"truncated_shard": EACH}),
    "bit flipped in a header": (partial(flip, b"005.txt", 2), {"shard_not_as_its_manifest_says": EACH}),
    "bit flipped in a size": (partial(flip, b"005.txt", 134), {"shard_not_as_its_manifest_says": EACH}),
    "bit flipped in an image": (partial(flip, b"IDAT", 9), {"shard_not_as_its_manifest_says": EACH}),
    "bit flipped in a caption": (partial(flip, b"005.txt", 512), {"shard_not_as_its_manifest_says": EACH}),
}


def damaged(name: str, workers: int) -> Seen:
    damage, expected = DAMAGE[name]
    made()
    damage()
    return counted(loader(num_workers=workers), **expected)


def damaged_plain(name: str) -> Seen:
    made()
    DAMAGE[name][0]()
    return plain()


for _number, _name in enumerate(DAMAGE):
    _title = f"C{3 if 'flipped' in _name else 1} {_name}"
    case(_title, "counted by reason, pairs right", quick=_number % 6 == 2)(partial(damaged, _name, _number % 2))
    stock(_title)(partial(damaged_plain, _name))


def _packed() -> None:
    made()
    path = Path(f"shards/{HURT}.tar")
    Path(f"shards/{HURT}.tar.gz").write_bytes(gzip.compress(path.read_bytes())[:-200])
    path.unlink()
    Path("shards/manifest.json").unlink()
    names = [f"{n}.tar" + ".gz" * (n == HURT) for n in range(SHARDS)]
    Path("shards/sizes.json").write_text(str(dict.fromkeys(names, EACH)).replace("'", '"'))


@case("C1 gzip with its tail cut", "counted as unreadable, no short shard")
def gzip_cut() -> Seen:
    _packed()
    return counted(loader(), unreadable_shard=EACH)


@stock("C1 gzip with its tail cut")
def gzip_cut_plain() -> Seen:
    _packed()
    return plain()


@case("C1 cut shard without a manifest", "an error at the start that names it", quick=True)
def no_manifest() -> str:
    made()
    Path("shards/manifest.json").unlink()
    Path("shards/sizes.json").unlink()
    DAMAGE["cut between members"][0]()
    return raised(loader, f"shards/{HURT}.tar after 6 samples")


JOINED: dict[str, Callable[[bytes], bytes]] = {
    "a page of zeros over headers": lambda d: d[:8192] + bytes(4096) + d[12288:],
    "one block of zeros": lambda d: d[: _place(d, b"005.cls")] + bytes(512) + d[_place(d, b"005.cls") + 512 :],
    "another tar joined to it by cat": lambda d: d + Path("shards/0.tar").read_bytes(),
}


def more_behind_zeros(name: str) -> str:
    made()
    for manifest in ("manifest.json", "sizes.json"):
        Path("shards", manifest).unlink()
    replaced(JOINED[name](Path(f"shards/{HURT}.tar").read_bytes()))
    assert [result.ok for result in check_shards("shards", 0)].count(False) == 1
    raised(lambda: write_manifest("shards"), "are not its end")
    return raised(loader, f"shards/{HURT}.tar after")


for _name in JOINED:
    case(f"C1 {_name}, no manifest", "an error at the start, in `data check` and for a new manifest", quick=True)(
        partial(more_behind_zeros, _name)
    )


@case("C1 whole shard that is shorter than its manifest says", "counted: it is another one")
def another() -> Seen:
    made()
    samples = [numbered(100 + row) | {"__key__": f"{row:03d}"} for row in range(EACH)]
    write_tar(Path(f"shards/{HURT}.tar"), [{k: v for k, v in sample.items() if k != "cls"} for sample in samples])
    return counted(loader(), shard_not_as_its_manifest_says=EACH)


def overwritten(workers: int) -> Seen:
    made()
    data = loader(num_workers=workers)
    batches = iter(data)
    next(batches)
    path = Path(f"shards/{HURT}.tar")
    content = path.read_bytes()
    moved = b"".join(content[begin : begin + 3072] for begin in range((EACH - 1) * 3072, -1, -3072))
    with open(path, "r+b") as file:  # in place: every sample is where another was
        file.write(moved)
    seen = [number for batch in batches for number in batch["text"][:, 0].tolist()]
    report = data.report
    assert set(report.skipped) <= {"shard not as its manifest says (sha256)"}, report.summary()
    assert report.bad, "the change was not seen"
    assert report.seen + report.bad == report.total
    return Seen(f"{report.bad} of its {EACH} samples counted, {len(set(seen))} others seen after it", lost=0)


for _workers in (0, 1):
    case(f"C3 shard overwritten in place during the epoch, {_workers} workers", "compared again and counted")(
        partial(overwritten, _workers)
    )


@case("C3 index that is another tar's", "an error before a wrong pair; the index is made anew", quick=True)
def false_index() -> str:
    made()
    shard_index(f"shards/{HURT}.tar")
    place = Path(f"shards/.index/{HURT}.tar.npz")
    with np.load(place) as kept:
        content = dict(kept)
    column = content["types"].tolist().index("txt")
    content["offsets"][column] = np.roll(content["offsets"][column], 1)
    np.savez(place, **content)
    seen = raised(lambda: epoch(loader()), "was not true of it: it has been made anew")
    assert len(epoch(loader())) == SHARDS * EACH
    return seen


@case("C3 resume on shards of other content, same names and counts", "refused", quick=True)
def other_content() -> str:
    made()
    state = loader().state_dict()
    write_tar(Path("shards/0.tar"), [numbered(90 + row) | {"__key__": f"{row:03d}"} for row in range(EACH)])
    write_manifest("shards")
    return raised(lambda: loader().load_state_dict(state), "and other content")


@case("C2 shard missing at the start", "an error that names it", quick=True)
def missing() -> str:
    made()
    Path("shards/2.tar").unlink()
    return raised(loader, "lists 1 shard(s), first 2.tar, which is not there")


@case("C2 directory in place of a shard", "counted")
def directory() -> Seen:
    made()
    data = loader()
    Path("shards/2.tar").unlink()
    Path("shards/2.tar").mkdir()
    return counted(data, unreadable_shard=EACH)


@case("C2 shard that vanishes during the epoch", "counted; its samples that were open are still seen")
def vanishing() -> Seen:
    made()
    data = loader(window=1, num_workers=1)
    batches = iter(data)
    next(batches)
    for tar in Path("shards").glob("*.tar"):  # workers may be writing notes beside them
        tar.unlink()
    for _ in batches:
        pass
    report = data.report
    assert set(report.skipped) == {"unreadable shard"}, report.summary()
    assert report.seen + report.bad == report.total
    return Seen(report.summary().splitlines()[0], lost=0)


@case("C4 key twice in a shard", "two samples, pairs right")
def twice() -> Seen:
    made(change=lambda s: s | {"__key__": "same"})
    return counted(loader())


@case("C4 members of a sample apart", "counted as without caption and without image, never paired")
def apart() -> Seen:
    directory = made()
    samples = [numbered(row) | {"__key__": f"{row:03d}"} for row in range(EACH)]
    images = [{"__key__": s["__key__"], "png": s["png"]} for s in samples]
    texts = [{"__key__": s["__key__"], "txt": s["txt"]} for s in samples]
    write_tar(directory / "0.tar", images + texts)
    write_manifest(directory)
    return counted(loader(), missing_caption=EACH, missing_image=EACH)


@case("C4 image without caption, caption without image", "counted", quick=True)
def halves() -> Seen:
    def half(sample: dict) -> dict:
        return sample | {3: {"png": None}, 5: {"txt": None}}.get(int(sample["__key__"]), {})

    made(change=half)
    return counted(loader(), missing_caption=SHARDS, missing_image=SHARDS)


@case("C4 order of members swapped", "pairs right")
def swapped() -> Seen:
    made(change=lambda s: {"__key__": s["__key__"], "txt": s["txt"], "png": s["png"]})
    return counted(loader())


@case("C5 fewer shards than ranks and workers", "all of them work: samples are shared, not shards")
def few_shards() -> Seen:
    made(shards=1, each=64)
    ranks = [loader(rank=rank, world_size=2, num_workers=2) for rank in range(2)]
    seen = [number for data in ranks for batch in data for number in batch["text"][:, 0].tolist()]
    return Seen(f"{len(seen)} seen by 2 ranks of 2 workers from 1 shard", lost=none_left(seen, list(range(64))))


@case("C6 bad samples on one rank only", "as many batches on both ranks, and the account adds up over them")
def uneven() -> Seen:
    made(change=lambda s: s | {"png": b""} if s["txt"] in ("3", "9", "20") else s)
    ranks = [loader(rank=rank, world_size=2) for rank in range(2)]
    batches = [sum(1 for _ in data) for data in ranks]
    assert batches[0] == batches[1] == 8
    reports = [data.report for data in ranks]
    assert sum(r.seen + r.bad for r in reports) + reports[0].tail == reports[0].total
    return Seen(f"{batches} batches, {[r.bad for r in reports]} bad", lost=0)


@case("C7 account of every epoch, order of each", "seen + skipped + tail = total; another order, the same each time")
def epochs() -> Seen:
    made(change=lambda s: s | {"txt": " "} if s["txt"] == "7" else s)
    data, again = loader(batch=10), loader(batch=10, num_workers=1)
    orders = [epoch(data) for _ in range(3)]
    assert orders == [epoch(again) for _ in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    return Seen("3 epochs of 64 in 3 orders, the same with a worker", lost=0)


@stock("C7 account of every epoch, order of each")
def epochs_plain() -> str:
    made()
    urls = [str(path) for path in sorted(Path("shards").glob("*.tar"))]
    data = webdataset.WebDataset(urls, shardshuffle=100, seed=1)
    orders = [[(s["__url__"], s["__key__"]) for s in data] for _ in range(3)]
    different = len({tuple(order) for order in orders})
    assert different == 3, f"{different} order(s) of the shards in 3 epochs"
    return "3 orders"


@case("C8 more bad samples than the limit", "stops with a summary")
def limit() -> str:
    made(change=lambda s: s | {"png": b"x"} if s["__key__"] == "003" else s)
    return raised(lambda: epoch(loader(limits=Limits(0.05))), "bad samples: the limit is 5.00% of 64")


@case("C8 bad ones in a row", "stops with a summary")
def row() -> str:
    made(change=lambda s: s | {"png": b"x"} if int(s["txt"]) >= 16 else s)
    return raised(lambda: epoch(loader(window=1, limits=Limits(1.0, 10))), "bad samples in a row")


@case("C8 all shards bad", "an error, and no endless loop", quick=True)
def all_bad() -> str:
    made()
    data = loader()
    for path in Path("shards").glob("*.tar"):
        os.truncate(path, 0)
    try:
        epoch(data)
    except BadDataError as error:
        return str(error).splitlines()[0]
    raise AssertionError("no error")


@case("C8 more samples than the manifest says", "an error that names both numbers")
def more() -> str:
    made()
    path = Path("shards/0.tar")
    write_tar(path, [numbered(row) for row in range(EACH + 4)])
    return raised(lambda: epoch(loader()), "holds 20 samples, its manifest or sizes.json says 16")

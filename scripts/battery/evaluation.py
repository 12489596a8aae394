"""Group I, evaluations: ended, repeated, of data that does not fit, and on full disks."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import open_clip
import torch

from battery.case import Seen, case
from battery.small import numbered, refused, short
from diffvision.data.made.digits import make_digits
from diffvision.data.shards.writer import write_tar
from diffvision.evaluation import features, run
from diffvision.evaluation.cache import Cache
from diffvision.evaluation.features import Features
from diffvision.evaluation.output import write_json

IMAGES, CLASSES = 200, 10
DATA = Path("numbers")


def folder(*, classes: int = CLASSES) -> Path:
    """An evaluation folder of numbered images in two shards, and weights in weights.pt."""
    (DATA / "test").mkdir(parents=True)
    for shard in range(2):
        half = range(shard * IMAGES // 2, (shard + 1) * IMAGES // 2)
        write_tar(DATA / "test" / f"{shard}.tar", [numbered(number) for number in half])
    (DATA / "test" / "nshards.txt").write_text("2")
    (DATA / "classnames.txt").write_text("".join(f"number {number}\n" for number in range(classes)))
    (DATA / "zeroshot_classification_templates.txt").write_text("a photo of {c}\n{c}\n")
    torch.manual_seed(0)
    torch.save(open_clip.create_model("DiffCLIP-debug").state_dict(), "weights.pt")
    return DATA


def evaluated(*, cache: bool = False, batch_size: int = 16, num_workers: int = 0, **more: str) -> dict[str, float]:
    features.IMAGES = 32  # a piece, so that there are several
    settings = {"model": "DiffCLIP-debug", "checkpoint": "weights.pt", "data": str(DATA), "device": "cpu", **more}
    kept = {"cache": "cache"} if cache else {}
    return run(**settings, **kept, batch_size=batch_size, num_workers=num_workers)  # type: ignore[arg-type]


def encoded() -> list[int]:
    """Numbers of the images that go through a model from now on, a batch each."""
    numbers: list[int] = []
    plain = Features._encode_images

    def counted(self: Features, images: torch.Tensor) -> torch.Tensor:
        numbers.append(len(images))
        return plain(self, images)

    Features._encode_images = counted  # type: ignore[method-assign]
    return numbers


def killed(*, kills: int) -> None:
    """Begin the evaluation and kill it when another piece is there, so many times."""
    for _ in range(kills):
        there = len(list(Path("cache").rglob("*.safetensors")))
        process = multiprocessing.get_context("fork").Process(target=evaluated, kwargs={"cache": True})
        process.start()
        while process.is_alive() and len(list(Path("cache").rglob("*.safetensors"))) == there:
            time.sleep(0.002)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()


@case("I1 evaluation killed three times", "goes on where its features end; the metrics are equal bit by bit")
def interrupted() -> Seen:
    folder()
    expected = evaluated()
    killed(kills=3)
    numbers = encoded()
    assert evaluated(cache=True) == expected
    assert sum(numbers) < IMAGES, "all was worked out again"
    return Seen(f"equal metrics; {IMAGES - sum(numbers)} of {IMAGES} images found after three kills", lost=0)


def spoil(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "cut":
        del content[len(content) // 2 :]
    elif how == "empty":
        content.clear()
    elif how == "flipped in one bit":
        content[-5] ^= 1
    elif how == "of another piece":
        content[:] = next(other for other in path.parent.iterdir() if other != path).read_bytes()
    path.write_bytes(content)


def damaged(how: str) -> str:
    folder()
    expected = evaluated(cache=True)
    piece = max(Path("cache").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    spoil(piece, how)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert evaluated(cache=True) == expected
    words = [str(warning.message) for warning in told if "worked out anew" in str(warning.message)]
    assert len(words) == 1, words
    return short(words[0])


for how in ("cut", "empty", "flipped in one bit", "of another piece"):
    case(f"I2 kept features {how}", "told, worked out anew, the same metrics")(partial(damaged, how))


def limited(call: Callable[[], object], size: int) -> object:
    """A call where no file may grow over `size` bytes: writing more fails as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        return call()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@case("I3 disk full under the cache", "one warning; the metrics are those of an evaluation without")
def full_cache() -> str:
    folder()
    expected = evaluated()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert limited(partial(evaluated, cache=True), 4000) == expected
    words = [str(warning.message) for warning in told if "keeps nothing more" in str(warning.message)]
    assert len(words) == 1, words
    assert not list(Path("cache").rglob("*.part")), "leavings"
    return short(words[0])


@case("I4 disk full while results are written", "an error; the results before are whole, no leavings", quick=True)
def full_output() -> str:
    write_json(Path("out/results.json"), {"before": 1})
    try:
        limited(lambda: write_json(Path("out/results.json"), list(range(10_000))), 4000)
    except OSError as error:
        assert json.loads(Path("out/results.json").read_text()) == {"before": 1}
        assert len(list(Path("out").iterdir())) == 1, "leavings"
        return str(error)
    raise AssertionError("no error")


def write_on_and_on() -> None:
    for number in range(100_000):
        write_json(Path("results.json"), [number] * 20_000)


@case("I5 killed while results are written, 20 times", "the file is always whole")
def killed_while_writing() -> Seen:
    write_json(Path("results.json"), [0] * 20_000)
    for kill in range(20):
        process = multiprocessing.get_context("fork").Process(target=write_on_and_on)
        process.start()
        time.sleep(0.05 + kill / 100)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert len(set(json.loads(Path("results.json").read_text()))) == 1
    return Seen("20 kills, always one whole result")


@case("I6 batch sizes 1, 7, 32 and workers 0, 2", "the same metrics")
def same() -> Seen:
    folder()  # for the weights
    make_digits("digits", copies=1)
    more = {"data": "digits", "tasks": "zero_shot,composition"}
    expected = evaluated(batch_size=32, **more)
    for batch_size, num_workers in ((1, 0), (7, 0), (7, 2), (32, 2)):
        found = evaluated(batch_size=batch_size, num_workers=num_workers, **more)
        assert found == expected, (batch_size, num_workers, found, expected)
    return Seen(f"all equal: {', '.join(f'{key} {value:.4f}' for key, value in expected.items())}", lost=0)


def misfit(change: Callable[[], object], words: str) -> str:
    folder()
    change()
    return short(refused("evaluate", "DiffCLIP-debug", f"--data={DATA}", "--num_workers=0", words=words))


def no_folder() -> None:
    DATA.rename("elsewhere")


def no_names() -> None:
    (DATA / "classnames.txt").unlink()


def few_names() -> None:
    (DATA / "classnames.txt").write_text("one\ntwo\n")


def no_shards() -> None:
    for path in (DATA / "test").glob("*.tar"):
        path.unlink()


def no_samples() -> None:
    no_shards()
    (DATA / "test" / "nshards.txt").write_text("1")
    write_tar(DATA / "test" / "0.tar", [])


def no_split() -> None:
    (DATA / "test").rename(DATA / "val")


for what, change, words in (
    ("folder that is not there", no_folder, "there is no numbers"),
    ("no class names", no_names, "no classnames.txt"),
    ("fewer class names than labels", few_names, "has the label 2, outside its 2 classes"),
    ("split without shards", no_shards, "0.tar is not there"),
    ("split without samples", no_samples, "no readable sample"),
    ("no such split", no_split, "no split test"),
):
    case(f"I7 {what}", "one error that names it", kind="input")(partial(misfit, change, words))


@case("I8 cache that is a file", "one error before data is read", kind="input")
def unwritable() -> str:
    folder()
    Path("file").touch()
    flags = ("evaluate", "DiffCLIP-debug", f"--data={DATA}", "--cache=file")
    return short(refused(*flags, words="is a file: name a folder"))


@case("I9 cache that is at its bound", "the features used last stay; the metrics are the same", quick=True)
def bounded() -> str:
    cache = Cache("cache", max_bytes=20_000)
    for number in range(10):
        cache.save(f"{number}" * 32, "piece", {"x": torch.zeros(1000)}, None)
        time.sleep(0.01)
    kept = sorted(path.name[0] for path in Path("cache").iterdir())
    assert kept == ["6", "7", "8", "9"], kept
    assert cache.load("9" * 32, "piece") is not None
    return "the last four of ten are kept"

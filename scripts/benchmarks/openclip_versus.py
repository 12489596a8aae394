"""Our loader against OpenCLIP's training data pipeline: the same shards, transform, tokenizer, workers and batches.

OpenCLIP's runs in a separate Python environment (`openclip_data.py`), since it needs webdataset 0.2.86. `environment`
makes one: the packages that differ, and a .pth file through which it has all others of the Python that runs this.
"""

import io
import json
import random
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import open_clip
from PIL import Image
from sklearn.datasets import load_sample_images

from diffvision.data import CaptionMember, ImageMember, ImageText, ShardLoader, ShardSet
from diffvision.data.shards.writer import write_manifest, write_tar
from openclip_data import MODEL, transform

BATCH = 128
WORDS = ["a", "photo", "of", "old", "temple", "roofs", "under", "sky", "with", "red", "flowers", "near", "water"]


def photos(directory: Path, shards: int = 8, each: int = 160) -> Path:
    """Write JPEGs of 256 to 512 pixels a side: parts of scikit-learn's two photographs, with captions of ten words."""
    draw, sources = random.Random(0), [Image.fromarray(image) for image in load_sample_images().images]
    directory.mkdir(parents=True)
    for shard in range(shards):
        samples = [_photo(draw, sources, shard * each + number) for number in range(each)]
        write_tar(directory / f"{shard:06d}.tar", samples)
    write_manifest(directory)
    return directory


def _photo(draw: random.Random, sources: list[Image.Image], number: int) -> dict[str, str | bytes]:
    width, height = draw.randint(256, 512), draw.randint(256, 512)
    source = draw.choice(sources)
    part = draw.uniform(0.4, 1.0) * min(source.width / width, source.height / height)
    left, top = draw.uniform(0, source.width - part * width), draw.uniform(0, source.height - part * height)
    box = (left, top, left + part * width, top + part * height)
    data = io.BytesIO()
    source.resize((width, height), Image.Resampling.BICUBIC, box=box).save(data, "JPEG", quality=draw.randint(80, 95))
    return {"__key__": f"{number:06d}", "jpg": data.getvalue(), "txt": " ".join(draw.choices(WORDS, k=10))}


def environment(directory: Path) -> str:
    """Make a Python environment with webdataset 0.2.86, and all else from the one that runs this; some ten MB."""
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    python = directory / "bin" / "python"
    packages = ["webdataset==0.2.86", "braceexpand", "pandas", "python-dateutil", "pytz", "six"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([str(python), "-m", "pip", "install", *quiet, *packages], check=True)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([str(python), "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    Path(site, "everything_else.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(python)


class OpenClip:
    """OpenCLIP's pipeline in a process that stays between epochs, and its workers with it."""

    def __init__(self, python: str, shards: ShardSet, size: int, workers: int) -> None:
        names = [Path(shard.location) for shard in shards.shards]
        pattern = f"{names[0].parent}/{{{names[0].stem}..{names[-1].stem}}}.tar"
        program = Path(__file__).with_name("openclip_data.py")
        self._process = subprocess.Popen(
            [python, str(program), pattern, *map(str, (len(shards), size, workers, BATCH))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.versions = self._answer()

    def epoch(self, clock: str = "seconds") -> float:
        """Run an epoch; return its samples a second, by the wall's clock or by the processor's ("cpu")."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._answer()
        return answer["samples"] / answer[clock]

    def end(self) -> None:
        assert self._process.stdin is not None
        # Closing it would not do: our workers were forked while it was open.
        self._process.stdin.write("end\n")
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("OpenCLIP's pipeline ended: run scripts/benchmarks/openclip_data.py by hand to see why")
        return json.loads(line)


@contextmanager
def running(python: str, shards: ShardSet, size: int, workers: int) -> Iterator[OpenClip]:
    pipeline = OpenClip(python, shards, size, workers)
    try:
        yield pipeline
    finally:
        pipeline.end()


def compare(python: str, directory: Path, size: int, workers: int, rounds: int) -> tuple[float, float, list[float]]:
    """Return the median samples a second of ours and of OpenCLIP's, and the ratio in each round."""
    shards = ShardSet(directory)
    kind = ImageText(ImageMember(transform(size)), CaptionMember(), open_clip.get_tokenizer(MODEL))
    loader = ShardLoader(shards, kind, BATCH, num_workers=workers)

    def epoch() -> float:
        start = time.perf_counter()
        count = sum(len(batch["image"]) for batch in loader)
        return count / (time.perf_counter() - start)

    ours, other = [], []
    with running(python, shards, size, workers) as theirs:
        # Processes start, and files are read for the first time.
        epoch(), theirs.epoch()
        for number in range(rounds):
            for way in ((0, 1), (1, 0))[number % 2]:
                (other if way else ours).append(theirs.epoch() if way else epoch())
    return statistics.median(ours), statistics.median(other), [a / b for a, b in zip(ours, other, strict=True)]


def table(python: str, kinds: dict[str, tuple[Path, int]], rounds: int) -> Iterator[str]:
    """Yield the lines of a table; `kinds` has directory and image size of each kind of shards."""
    yield "| shards | workers | ours, samples/s | OpenCLIP's | ratio (median of rounds) | its range |"
    yield "|---|---:|---:|---:|---:|---|"
    for name, (directory, size) in kinds.items():
        for workers in (1, 2):
            ours, other, ratios = compare(python, directory, size, workers, rounds)
            middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
            yield f"| {name} | {workers} | {ours:,.0f} | {other:,.0f} | {middle:.2f} | {low:.2f} to {high:.2f} |"

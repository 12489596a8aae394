"""Text for the experiments on a GPU: Linux's sources and the documents of `text.py`, in one file below 40 MB.

    apt-get download linux-source-6.1 dict-gcide dict-foldoc wordnet-base python3.11-doc linux-doc-6.1 perl-doc
    apt-get download postgresql-doc-15 rust-doc
    for d in *.deb; do dpkg-deb -x $d packages; done
    python scripts/studies/data/gpu_text.py packages,stdlib runs/gpu/text.xz

A directory of the sources, or of a document's name, is in one part: `rates` chooses learning rates, `test` is for the
comparison, `train` has the rest. The file holds the ids of a BPE of 4,096 that was trained on `train`.
"""

import argparse
import hashlib
import io
import lzma
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.progress import track
from text import SOURCES, resolve

VOCABULARY = 4096
TOKENS = {"train": 90_000_000, "rates": 1_100_000, "test": 1_100_000}
_SKIPPED = ("drivers/gpu/drm/amd/include", "tools/perf/pmu-events", "Documentation/")  # tables, and linux-doc
_SUFFIXES = (".c", ".h", ".S", ".rst", ".txt", ".py", ".rs")
_LARGEST = 200_000  # bytes; longer files are tables


def linux_documents(archive: Path) -> Iterator[tuple[str, str]]:
    """Yield (directory, text) of the sources in Debian's archive of Linux, in its order."""
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.partition("/")[2]
            if (
                member.isfile()
                and name.endswith(_SUFFIXES)
                and member.size < _LARGEST
                and not name.startswith(_SKIPPED)
            ):
                content = tar.extractfile(member)
                assert content is not None
                yield name.rpartition("/")[0], content.read().decode("utf-8", "replace")


def documents(source: str) -> Iterator[tuple[str, str]]:
    """Yield (directory, text) of Linux's sources and of the documents of `text.py`."""
    folder = source.split(",")[0]
    yield from linux_documents(next(Path(folder).glob("usr/src/linux-source-*.tar.xz")))
    for name, path in resolve(source).items():
        for document, text in SOURCES[name].read(path):
            yield f"{name}/{document.rpartition('/')[0] or document}", text


def part_of(directory: str) -> str:
    """Return the part that a directory is in: 14 of 1,000 are for each of `rates` and `test`."""
    number = int.from_bytes(hashlib.sha256(directory.encode()).digest()[:4]) % 1000
    return "rates" if number < 14 else "test" if number < 28 else "train"


def write(source: str, file: Path) -> None:
    """Tokenise the documents, directories in the order of their hash, and write the compressed ids of all parts."""
    texts = sorted(track(documents(source), "reading"), key=lambda one: hashlib.sha256(one[0].encode()).digest())
    sample = [text for directory, text in texts if part_of(directory) == "train"][::20]
    tokenizer = train_tokenizer(sample, VOCABULARY)
    ids: dict[str, list[np.ndarray]] = {part: [] for part in TOKENS}
    counts, characters = dict.fromkeys(TOKENS, 0), 0
    for directory, text in track(texts, "tokenising"):
        part = part_of(directory)
        if counts[part] < TOKENS[part]:
            ids[part].append(np.array([*tokenizer.encode(text), tokenizer.eos_id], dtype=np.uint16))
            counts[part] += len(ids[part][-1])
            characters += len(text)
    content = {part: np.concatenate(ids[part])[: TOKENS[part]] for part in TOKENS}
    buffer = io.BytesIO()
    np.savez(buffer, **content)
    file.parent.mkdir(parents=True, exist_ok=True)
    # Two bytes a token: contexts of literals and positions are aligned to them.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 28, "lc": 0, "lp": 1, "pb": 1}]
    file.write_bytes(lzma.compress(buffer.getvalue(), filters=filters))
    sizes = ", ".join(f"{part} {len(values):,}" for part, values in content.items())
    print(f"{sizes} tokens of {characters / sum(counts.values()):.2f} characters; {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "source", help="the folder of packages, then NAME or NAME=PATH of others, with commas between them"
    )
    parser.add_argument("file", type=Path)
    write(**vars(parser.parse_args()))

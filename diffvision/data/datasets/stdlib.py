"""`stdlib`: a text corpus that comes with Python, the source of its standard library and the prose of `help()`.

A document is a source file, or one topic of `pydoc_data`. Tests and their data are left out: not every installation has
them. Which documents are for validation follows from their names alone. The text is that of the running Python, so
another version makes another corpus; files of one version are the same on every platform, except for what is
written at installation, which is left out too.
"""

import ast
import hashlib
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from diffvision.data.shards.writer import Sample, refuse_existing, write_shards

VALIDATION_PERCENT = 5
_PER_SHARD = 256
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
_TOPICS = "pydoc_data/topics.py"  # its prose comes topic by topic


def make_stdlib(directory: str | Path, source: str | Path | None = None) -> str:
    """Write the source of Python's standard library and the prose of `help()` as text shards.

    `train` and `validation` are shards of documents.

    Args:
        directory: the folder to write.
        source: the library's directory; by default that of the running Python.

    Raises:
        ValueError: the directory has shards already, or the library has no source files.
    """
    directory, root = Path(directory), Path(source or sysconfig.get_paths()["stdlib"])
    for split in ("train", "validation"):
        refuse_existing(directory / split)
    documents = dict(library_documents(root))
    if not documents:
        raise ValueError(f"{root} has no Python source files: this Python was installed without them; use another")
    written = []
    for split in ("train", "validation"):
        names = [name for name in sorted(documents) if split_of(name) == split]
        write_shards(directory / split, _samples(names, documents), _PER_SHARD)
        characters = sum(len(documents[name]) for name in names)
        written.append(f"{len(names):,} documents of {characters:,} characters in {split}")
    return ", ".join(written)


def split_of(name: str) -> str:
    """Return the split of a document, from a hash of its name."""
    return "validation" if held_out(name, VALIDATION_PERCENT) else "train"


def held_out(name: str, percent: int) -> bool:
    """Return whether a name is among the given percentage that a hash of it selects."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100 < percent


def _samples(names: list[str], documents: dict[str, str]) -> Iterator[Sample]:
    for number, name in enumerate(names):
        # A dot would end the key.
        yield {"__key__": f"{number:06d}/{name.removesuffix('.py').replace('.', '_')}", "txt": documents[name]}


def library_documents(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each document of a standard library; empty files and those in other encodings are not."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _LEFT_OUT & set(path.parts[len(root.parts) :]) or path.name.startswith("_sysconfigdata") or name == _TOPICS:
            continue
        try:
            with tokenize.open(path) as file:  # by the encoding that the file declares
                text = file.read()
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield name, text
    if (root / _TOPICS).is_file():
        yield from _topics((root / _TOPICS).read_text(encoding="utf-8"))


def _topics(source: str) -> Iterator[tuple[str, str]]:
    """Yield the entries of the one dictionary in the file, read without running it."""
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            for topic, text in sorted(ast.literal_eval(statement.value).items()):
                yield f"pydoc_data/topics/{topic}", text.strip() + "\n"

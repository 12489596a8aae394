"""English from packages that anyone can install: dictionaries, handbooks and manuals, read by `gpu_text.py`.

`SOURCES` has a row for each package. How markup becomes text is in `markup` and `dictionaries`. Nothing is downloaded:
a folder is searched for what `apt-get install` or `dpkg-deb -x` has put there.
"""

import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import markup
from dictionaries import dictd_entries, wordnet_entries
from diffvision.data.datasets.stdlib import library_documents
from diffvision.data.shards.sources import natural


@dataclass(frozen=True)
class Source:
    """A package with English in it.

    Attributes:
        package: its name in Debian; empty for the running Python's library.
        path: where its text is below the folder of packages, a pattern; the newest version is read.
        read: a function that yields (name, text) of the documents there.
        licence: of the text.
        single: whether the text is one file.
    """

    package: str
    path: str
    read: Callable[[Path], Iterator[tuple[str, str]]]
    licence: str
    single: bool = False


def _pages(
    convert: Callable[[str], str], *endings: str, but: tuple[str, ...] = ()
) -> Callable[[Path], Iterator[tuple[str, str]]]:
    """Return a reader of the files with one of these endings, without files and folders that match one of `but`."""

    def read(root: Path) -> Iterator[tuple[str, str]]:
        for path in sorted(path for path in root.rglob("*") if path.name.endswith(endings)):
            relative = path.relative_to(root)
            if path.is_file() and not any(fnmatch(part, pattern) for part in relative.parts for pattern in but):
                name = relative.as_posix().removesuffix(next(end for end in endings if path.name.endswith(end)))
                yield name, convert(path.read_text(encoding="utf-8", errors="replace"))

    return read


def _books(*names: str) -> Callable[[Path], Iterator[tuple[str, str]]]:
    """Return a reader of these books of Rust's documentation, without the pages that print a whole book."""

    def read(root: Path) -> Iterator[tuple[str, str]]:
        pages = _pages(markup.html, ".html", but=("print.html", "toc.html", "*-edition"))
        for name in names:
            if (root / name).is_dir():
                yield from ((f"{name}/{page}", text) for page, text in pages(root / name))

    return read


def _library(root: Path) -> Iterator[tuple[str, str]]:
    return library_documents(root)


SOURCES: dict[str, Source] = {
    "gcide": Source(
        "dict-gcide",
        "usr/share/dictd/gcide.dict.dz",
        dictd_entries,
        "GPL-3.0-or-later",
        single=True,
    ),
    "foldoc": Source(
        "dict-foldoc",
        "usr/share/dictd/foldoc.dict.dz",
        dictd_entries,
        "GFDL-1.1-or-later",
        single=True,
    ),
    "wordnet": Source(
        "wordnet-base",
        "usr/share/wordnet",
        wordnet_entries,
        "WordNet 3.0",
    ),
    "python-doc": Source(
        "python3.11-doc",
        "usr/share/doc/python3.*/html/_sources",
        _pages(markup.rst, ".rst.txt", ".rst"),
        "PSF-2.0",
    ),
    "linux-doc": Source(
        "linux-doc-6.1",
        "usr/share/doc/linux-doc-*/html/_sources",
        _pages(markup.rst, ".rst.txt", ".rst", but=("translations",)),
        "GPL-2.0",
    ),
    "perl-doc": Source(
        "perl-doc",
        "usr/share/perl/5.*/pod",
        # A table of contents, and introductions in other languages.
        _pages(markup.pod, ".pod", but=("perltoc.pod", "perlcn.pod", "perljp.pod", "perlko.pod", "perltw.pod")),
        "Artistic-1.0 or GPL-1.0-or-later",
    ),
    "postgresql-doc": Source(
        "postgresql-doc-15",
        "usr/share/doc/postgresql-doc-*/html",
        _pages(markup.html, ".html", but=("bookindex.html", "index.html")),
        "PostgreSQL",
    ),
    "rust-doc": Source(
        "rust-doc",
        "usr/share/doc/rust-doc/html",
        _books("book", "reference", "nomicon", "rust-by-example", "embedded-book", "edition-guide", "rustc", "rustdoc"),
        "MIT or Apache-2.0",
    ),
    "stdlib": Source("", "", _library, "PSF-2.0"),
}


def resolve(items: str) -> dict[str, Path]:
    """Return where each source's text is, in the order of `SOURCES`."""
    paths: dict[str, Path] = {}
    for item in filter(None, map(str.strip, items.split(","))):
        name, equals, path = item.partition("=")
        if name in SOURCES:
            paths[name] = _path_of(name, Path(path) if equals else None)
        elif equals or not Path(item).is_dir():
            no_folder = "" if equals else ", and no folder"
            raise ValueError(f"no source of text is called {name!r}{no_folder}: choose one of {', '.join(SOURCES)}")
        else:
            there = {name: found for name in SOURCES if (found := _below(name, Path(item)))}
            if not there:
                raise ValueError(f"folder {item} has no source of text that is known; {_how_to_get()}")
            paths |= there
    if not paths:
        raise ValueError(f"--source names nothing: {_how_to_get()}")
    return {name: paths[name] for name in SOURCES if name in paths}


def _path_of(name: str, path: Path | None) -> Path:
    """Return where the text of one source is: below a path, the path itself, or where it is installed."""
    if name == "stdlib":
        return path or Path(sysconfig.get_paths()["stdlib"])
    root = path or Path(os.sep)
    if below := _below(name, root):
        return below
    if path and (path.is_file() if SOURCES[name].single else path.is_dir()):
        return path
    raise ValueError(f"source {name} is not in {root}; {_how_to_get(name)}")


def _below(name: str, root: Path) -> Path | None:
    pattern = SOURCES[name].path
    matches = sorted(root.glob(pattern), key=lambda path: natural(str(path))) if pattern else []
    return matches[-1] if matches else None


def _how_to_get(name: str = "gcide") -> str:
    package = SOURCES[name].package
    return (
        f"`apt-get install {package}` and {name}, "
        f"or `apt-get download {package} && dpkg-deb -x {package}_*.deb FOLDER` and {name}=FOLDER"
    )

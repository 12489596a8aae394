"""`tuxpaint`: stamps of the drawing program Tux Paint with their English captions, for tests only.

They are photographs cut out of their background, and drawings. Letters of alphabets are left out, and so are stamps
whose caption an earlier one has and those that come as SVG.
"""

from collections.abc import Iterator
from pathlib import Path

from diffvision.data.shards.writer import write_about
from diffvision.files import decoded
from diffvision.lab.datasets.cutouts import BACKGROUND, SIZE, paste, refuse_written, unpacked, write_retrieval
from diffvision.progress import track

PACKAGE = "tuxpaint-stamps-default"
LICENCE = "GPL-2+"
_STAMPS = "usr/share/tuxpaint/stamps"
_LEFT_OUT = ("symbols", "alphabets")


def make_tuxpaint(directory: str | Path, source: str | Path) -> str:
    """Write stamps of Tux Paint with their captions as the evaluation folder `retrieval`, for tests only.

    Args:
        directory: the folder to write.
        source: the folder where `dpkg-deb -x` unpacked the package tuxpaint-stamps-default, or / where it is installed.

    Raises:
        ValueError: the package is not there, or the directory has shards already.
    """
    directory, stamps = Path(directory), unpacked(source, _STAMPS, PACKAGE)
    refuse_written(directory)
    written = write_retrieval(directory / "retrieval", "test", _write_captions(stamps))
    source = f"Debian package {PACKAGE}, https://tuxpaint.org/stamps"
    write_about(directory, source, LICENCE, background=BACKGROUND, size=SIZE, samples={"retrieval/test": written})
    return f"{written:,} stamps with captions, for tests"


def _write_captions(stamps: Path) -> Iterator[tuple[str, bytes, str]]:
    """Yield key, picture and caption of the stamps to be retrieved."""
    captions: set[str] = set()
    for path in track(sorted(stamps.rglob("*.png")), "stamps"):
        name, text = path.relative_to(stamps).with_suffix(""), path.with_suffix(".txt")
        # Mirrored stamps (x_mirror.png) have no caption.
        if name.parts[:2] == _LEFT_OUT or not text.is_file():
            continue
        # The first line is English; the others are translations, "de.utf8=Ein Tiger."
        caption = decoded(text.read_bytes(), text).partition("\n")[0].strip()
        if not caption or caption.lower() in captions:
            continue
        captions.add(caption.lower())
        yield "-".join(name.parts).replace(".", "_"), paste(path, trim=True), caption

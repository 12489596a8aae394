"""Cut-outs: pictures with transparent parts, pasted onto a plain background, and their evaluation folders.

`emoji` is made of them.
"""

import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from diffvision.data.shards.writer import Sample, refuse_existing, write_evaluation_split

SIZE = 64
BACKGROUND = (180, 180, 180)
"""A grey on which white drawings are seen as well as black ones, and that the usual greys of drawings are not."""


class Rasteriser(NamedTuple):
    """What draws SVG files: its name with the version, and a function from a file to a PNG of SIZE pixels."""

    name: str
    draw: Callable[[Path], bytes]


def paste(picture: str | Path | bytes, size: int = SIZE) -> bytes:
    """Return a PNG [size, size]: the picture, scaled to fit, in the middle of the background.

    Args:
        picture: a file, or its content; any format and mode that Pillow reads.
        size: of the result, in pixels.

    Raises:
        ValueError: it has so many pixels that Pillow takes it for an attack.
        OSError: it is missing, damaged or no picture.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(BytesIO(picture) if isinstance(picture, bytes) else picture) as opened:
                image = opened.convert("RGBA")
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise ValueError(f"{picture!s:.200} is too large: {error}") from None
        except FileNotFoundError:
            raise
        except (OSError, SyntaxError, ValueError) as error:
            raise OSError(f"{picture!s:.200} is damaged ({error}): get its package again") from None
    if max(image.size) != size:
        # Colours of transparent pixels are arbitrary: scaling weights them by alpha, as "RGBa" does.
        scale = size / max(image.size)
        fitting = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        image = image.convert("RGBa").resize(fitting, Image.Resampling.LANCZOS, reducing_gap=3.0).convert("RGBA")
    canvas = Image.new("RGB", (size, size), BACKGROUND)
    canvas.paste(image, ((size - image.width) // 2, (size - image.height) // 2), image)
    data = BytesIO()
    canvas.save(data, "PNG", compress_level=6)
    return data.getvalue()


def find_rasteriser() -> Rasteriser:
    """Return what draws SVG files on this machine: cairosvg if it is installed, else rsvg-convert.

    Raises:
        ValueError: neither cairosvg nor rsvg-convert is installed.
    """
    try:
        import cairosvg
    except (ImportError, OSError):  # OSError: the Python package without the library cairo
        pass
    else:
        name = f"cairosvg {cairosvg.__version__}"
        return _careful(name, lambda path: cairosvg.svg2png(url=str(path), output_width=SIZE, output_height=SIZE))
    program = shutil.which("rsvg-convert")
    if program is None:
        raise ValueError(
            "SVG files need cairosvg or rsvg-convert: pip install cairosvg, or apt-get install librsvg2-bin"
        )
    arguments = [program, "--width", str(SIZE), "--height", str(SIZE), "--keep-aspect-ratio"]
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return _careful(
        version, lambda path: subprocess.run([*arguments, str(path)], capture_output=True, check=True).stdout
    )


def _careful(name: str, draw: Callable[[Path], bytes]) -> Rasteriser:
    """Return a rasteriser that names the file which it cannot draw."""

    def drawn(path: Path) -> bytes:
        try:
            return draw(path)
        except Exception as error:  # cairosvg raises nearly anything on a damaged drawing
            raise ValueError(f"{path} cannot be drawn ({error}): get its package again") from None

    return Rasteriser(name, drawn)


def write_retrieval(folder: Path, split: str, pictures: Iterable[tuple[str, bytes, str]]) -> int:
    """Write a split of a retrieval folder from (key, picture, caption); return how many pictures it has."""
    samples: Iterator[Sample] = ({"__key__": key, "png": picture, "txt": caption} for key, picture, caption in pictures)
    return write_evaluation_split(folder / split, samples, dataset_type=["retrieval"])


def write_zero_shot(
    folder: Path, split: str, pictures: Iterable[tuple[str, bytes, str]], classes: Sequence[str], template: str
) -> int:
    """Write a split of a zero-shot folder from (key, picture, class name); return how many pictures it has."""
    labels = {name: str(label) for label, name in enumerate(classes)}
    samples: Iterator[Sample] = (
        {"__key__": key, "png": picture, "cls": labels[name]} for key, picture, name in pictures
    )
    return write_evaluation_split(folder / split, samples, classnames=classes, templates=[template])


def refuse_written(directory: Path) -> None:
    """Raise ValueError if a directory has shards already, in it or one or two levels below."""
    for folder in (directory, *directory.glob("*/"), *directory.glob("*/*/")):
        refuse_existing(folder)

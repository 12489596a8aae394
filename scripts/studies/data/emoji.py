"""The same emoji in several styles, with names and keywords; one style is never trained on.

    python scripts/studies/data/emoji.py data/emoji --source FOLDER

Noto's pictures are for training and Twemoji's for testing. Where OpenMoji is given, its coloured drawings are for
training and its outlines for testing, but for outlines that two emoji share or that are drawn so in colour too. Flags
are left out, and so is an emoji that looks like another one in Noto's or Twemoji's style.
A share of the emoji, each with its variants, is for validation, by default a tenth: their pictures by Noto are not
trained on, and no picture of them is in a test. Without OpenMoji their names are not trained on either.
"""

import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cutouts import (
    BACKGROUND,
    SIZE,
    Rasteriser,
    find_rasteriser,
    paste,
    refuse_written,
    write_retrieval,
    write_zero_shot,
)
from diffvision.data.shards.writer import Sample, write_about, write_evaluation_split, write_shards
from diffvision.progress import track
from emoji_table import Emoji, find_packages, minimal_pairs, read_emoji

LICENCES = {"Noto": "Apache-2.0 (emoji.json: MIT)", "Twemoji": "CC-BY-4.0", "OpenMoji": "CC-BY-SA-4.0"}
_VENDORS = {"Noto": "google", "Twemoji": "twitter"}
_OUTLINES = "OpenMoji's outlines"
_TEMPLATE = "a picture of {c}"  # training has it too: the style is new, the words are not

Pictures = Mapping[str, bytes]
"""{code of an emoji: PNG}"""


def make_emoji(directory: str | Path, source: str | Path, seed: int = 0, validation_percent: int = 10) -> str:
    """Write emoji in several styles with their names, one style for tests only.

    `train` are shards; `zero_shot`, `zero_shot-subcategories`, `retrieval` and `pairs` are evaluation folders
    with the splits `test`, in the unseen style, and `validation`; `zero_shot-subcategories` also has `train`. Where
    OpenMoji is given there is `retrieval-sketch`, of its outlines.

    Args:
        directory: the folder to write.
        source: a folder that holds folders emoji-datasource-google, emoji-datasource-twitter and, if wanted, openmoji:
            the unpacked packages; or a folder with node_modules that holds them: FOLDER after `npm install
            --ignore-scripts --prefix FOLDER emoji-datasource-google emoji-datasource-twitter openmoji`.
        seed: determines the order of training samples and which variants are paired.
        validation_percent: of the emoji, by a hash of their codes: a larger share holds a smaller one.

    Raises:
        ValueError: a package is missing; nothing that draws OpenMoji's SVG files is installed; shards exist already.
    """
    directory, packages = Path(directory), find_packages(Path(source))
    refuse_written(directory)
    rasteriser = find_rasteriser() if "OpenMoji" in packages else None
    emoji, styles = _pictures(read_emoji(packages), packages, rasteriser)
    plain = [e for e in emoji if not e.tone]
    validating = {e.code for e in emoji if e.is_validating(validation_percent)}
    trained = [("Noto", e) for e in emoji if e.code not in validating]
    trained += [("OpenMoji", e) for e in emoji if "OpenMoji" in styles]
    order = np.random.default_rng([seed, 30]).permutation(len(trained))
    samples: dict[str, Any] = {
        "train": write_shards(directory / "train", _training((trained[i] for i in order), styles))
    }
    for split, style in (("validation", "Noto"), ("test", "Twemoji")):
        chosen = [e for e in emoji if (e.code in validating) == (split == "validation")]
        rng = np.random.default_rng([seed, 31])
        samples |= _write_split(directory, split, chosen, plain, styles[style], rng)
        if _OUTLINES in styles:
            sketches = _write_captions([e for e in chosen if e.code in styles[_OUTLINES]], styles[_OUTLINES])
            samples[f"retrieval-sketch/{split}"] = write_retrieval(directory / "retrieval-sketch", split, sketches)
    known = [e for e in plain if e.code not in validating]
    samples["zero_shot-subcategories/train"] = _write_kinds(directory, "train", known, plain, styles["Noto"])
    write_about(
        directory,
        source=", ".join(f"npm {folder.name} {_version(folder)} ({style})" for style, folder in packages.items()),
        licence="; ".join(f"{style}: {LICENCES[style]}" for style in packages),
        styles={"train": [s for s in ("Noto", "OpenMoji") if s in styles], "validation": "Noto", "test": "Twemoji"},
        names="of OpenMoji's table (CLDR)" if "OpenMoji" in packages else "of emoji.json (Unicode)",
        rasteriser=rasteriser and rasteriser.name,
        background=BACKGROUND,
        size=SIZE,
        seed=seed,
        validation_percent=validation_percent,
        samples=samples,
    )
    without = "" if _OUTLINES in styles else "; no OpenMoji in the source: one style to train on, and no outlines"
    return f"{samples['train']:,} training pictures, {samples['retrieval/test']:,} emoji in the unseen style{without}"


def _version(package: Path) -> str:
    return json.loads((package / "package.json").read_text(encoding="utf-8"))["version"]


def _pictures(
    emoji: list[Emoji], packages: Mapping[str, Path], rasteriser: Rasteriser | None
) -> tuple[list[Emoji], dict[str, Pictures]]:
    """Return the emoji that can be distinguished, and their pictures in each style."""
    styles: dict[str, Pictures] = {}
    for style, vendor in _VENDORS.items():
        folder = packages[style] / "img" / vendor / "64"
        styles[style] = {e.code: paste(folder / e.image) for e in track(emoji, style)}
    emoji = _distinct(emoji, list(styles.values()))
    if rasteriser is not None:
        plain = [e for e in emoji if not e.tone]
        for style, colours, drawn in (("OpenMoji", "color", emoji), (_OUTLINES, "black", plain)):
            folder = packages["OpenMoji"] / colours / "svg"
            styles[style] = {e.code: paste(rasteriser.draw(folder / f"{e.drawing}.svg")) for e in track(drawn, style)}
        styles[_OUTLINES] = _outlines_alone(styles[_OUTLINES], styles["OpenMoji"])
    return emoji, styles


def _outlines_alone(outlines: Pictures, colours: Pictures) -> Pictures:
    """Return the outlines that only one emoji has, and that are no coloured drawing; hearts are alike."""
    count, trained = Counter(outlines.values()), set(colours.values())
    return {code: png for code, png in outlines.items() if count[png] == 1 and png not in trained}


def _distinct(emoji: Sequence[Emoji], styles: Sequence[Pictures]) -> list[Emoji]:
    """Return the emoji that share neither a name nor a picture, in any style, with an earlier one."""
    seen: set[tuple[int, str | bytes]] = set()
    kept = []
    for one in emoji:
        looks: set[tuple[int, str | bytes]] = {(number, pictures[one.code]) for number, pictures in enumerate(styles)}
        looks.add((-1, one.name))
        if not looks & seen:
            kept.append(one)
        seen |= looks
    return kept


def _training(emoji: Iterable[tuple[str, Emoji]], styles: Mapping[str, Pictures]) -> Iterator[Sample]:
    for style, one in emoji:
        facts = {"captions": one.captions, "name": one.name, "style": style, "skin_tone": one.tone}
        key = f"{style.lower()}-{one.code.lower()}"
        yield {"__key__": key, "png": styles[style][one.code], "json": json.dumps(facts, ensure_ascii=False)}


def _write_split(
    directory: Path,
    split: str,
    emoji: Sequence[Emoji],
    classes: Sequence[Emoji],
    pictures: Pictures,
    rng: np.random.Generator,
) -> dict[str, int]:
    """Write a split of the evaluation folders; return how many samples each has, of pairs by kind."""
    plain = [e for e in emoji if not e.tone]
    named = ((e.code.lower(), pictures[e.code], e.name) for e in plain)
    names = [e.name for e in classes]
    written: dict[str, Any] = {
        f"zero_shot/{split}": write_zero_shot(directory / "zero_shot", split, named, names, _TEMPLATE),
        f"zero_shot-subcategories/{split}": _write_kinds(directory, split, plain, classes, pictures),
        f"retrieval/{split}": write_retrieval(directory / "retrieval", split, _write_captions(plain, pictures)),
    }
    pairs = minimal_pairs(emoji, rng)
    write_evaluation_split(directory / "pairs" / split, _write_pairs(pairs, pictures), dataset_type=["pairs"])
    return written | {f"pairs/{split}": dict(Counter(kind for kind, _, _ in pairs))}


def _write_kinds(
    directory: Path, split: str, emoji: Sequence[Emoji], classes: Sequence[Emoji], pictures: Pictures
) -> int:
    """Write a split of the folder of subcategories, without those that hold all others ("other object")."""
    kinds = sorted({e.kind for e in classes if "other" not in e.kind})
    rows = ((e.code.lower(), pictures[e.code], e.kind) for e in emoji if e.kind in kinds)
    return write_zero_shot(directory / "zero_shot-subcategories", split, rows, kinds, _TEMPLATE)


def _write_captions(emoji: Iterable[Emoji], pictures: Pictures) -> Iterator[tuple[str, bytes, str]]:
    return ((e.code.lower(), pictures[e.code], e.caption) for e in emoji)


def _write_pairs(pairs: Iterable[tuple[str, Emoji, Emoji]], pictures: Pictures) -> Iterator[Sample]:
    for number, (kind, first, second) in enumerate(pairs):
        yield {
            "__key__": f"{number:05d}",
            "0.png": pictures[first.code],
            "1.png": pictures[second.code],
            "0.txt": first.caption,
            "1.txt": second.caption,
            "json": json.dumps({"kind": kind}),
        }


if __name__ == "__main__":
    parser = ArgumentParser(description=make_emoji.__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--source", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validation_percent", type=int, default=10)
    print(make_emoji(**vars(parser.parse_args())))

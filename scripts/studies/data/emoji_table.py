"""What packages of emoji say of each one: name, kind, keywords and skin tone, and which differ in a single respect."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from diffvision.data.datasets.stdlib import held_out
from diffvision.data.shards.sample import BadSource

PACKAGES = {"Noto": "emoji-datasource-google", "Twemoji": "emoji-datasource-twitter", "OpenMoji": "openmoji"}
INSTALL = "npm install --ignore-scripts --prefix FOLDER emoji-datasource-google emoji-datasource-twitter openmoji"
_REFUSED = {
    "emoji-datasource-apple": "Apple's pictures are not licensed for commercial use",
    "emoji-datasource-facebook": "Facebook's have no clear licence",
}
TONES = {"1F3FB": "light", "1F3FC": "medium-light", "1F3FD": "medium", "1F3FE": "medium-dark", "1F3FF": "dark"}
_VARIANTS = {"200D", "FE0F", "2640", "2642", "27A1", *TONES}  # joiners, gender, direction and skin tones
_ADULTS = {"1F468": "1F9D1", "1F469": "1F9D1"}  # man and woman: person
_KEYWORDS = 3  # in a caption
_WORDS = (  # names that differ in one of these words are a minimal pair
    ("gender", {"man", "woman"}),
    ("gender", {"men", "women"}),
    ("gender", {"boy", "girl"}),
    ("colour", {"red", "orange", "yellow", "green", "blue", "purple", "brown", "black", "white", "grey", "pink"}),
    ("direction", {"left", "right", "up", "down"}),
    ("direction", {"leftwards", "rightwards", "upwards", "downwards"}),
)
_FACING = re.compile(":? facing right$")
_DOING = {"person role": "role", "person activity": "activity", "person sport": "activity"}


@dataclass(frozen=True)
class Emoji:
    """An emoji, or one of its skin tones.

    Attributes:
        code: its code points, such as "1F468-200D-1F692".
        image: the name of its file in the packages of Noto and Twemoji.
        name: such as "man firefighter: dark skin tone".
        kind: Unicode's subcategory in words, such as "person role".
        keywords: other words for it.
        tone: "light" to "dark"; empty if this is the emoji without a skin tone.
        drawing: its file in OpenMoji's folders; empty where that is not given.
    """

    code: str
    image: str
    name: str
    kind: str
    keywords: tuple[str, ...] = ()
    tone: str = ""
    drawing: str = ""

    @property
    def caption(self) -> str:
        """The caption in evaluations, and the first one in training."""
        return f"a picture of {self.name}"

    @property
    def captions(self) -> list[str]:
        """The captions in training, of which one is drawn at a time."""
        few = [self.keywords[start : start + _KEYWORDS] for start in range(0, len(self.keywords), _KEYWORDS)]
        return [self.caption, f"{self.name}, {self.kind}", *(f"{self.kind}: {', '.join(words)}" for words in few)]

    def is_validating(self, percent: int) -> bool:
        """Return whether it is among the emoji for validation, together with its genders, skin tones and directions."""
        points = [_ADULTS.get(point, point) for point in self.code.split("-") if point not in _VARIANTS]
        return held_out("-".join(points) or self.code, percent)


def find_packages(source: Path) -> dict[str, Path]:
    """Return the folder of each style's package; OpenMoji's is left out where there is none.

    Raises:
        ValueError: one of the other packages is missing; those that are not free are refused by name.
    """
    root = source / "node_modules" if (source / "node_modules").is_dir() else source
    packages = {style: root / name for style, name in PACKAGES.items() if (root / name / "package.json").is_file()}
    if missing := [name for style, name in PACKAGES.items() if style not in packages and style != "OpenMoji"]:
        refused = [name for name in _REFUSED if source.name == name or (root / name).exists()]
        reasons = "".join(f"; {name} is not read, for {_REFUSED[name]}" for name in refused)
        raise ValueError(f"{source} has no package {' and no '.join(missing)}{reasons}: {INSTALL}")
    return packages


def read_emoji(packages: dict[str, Path]) -> list[Emoji]:
    """Return all emoji but flags, each followed by its skin tones, where all packages have the picture.

    Names and keywords are those of OpenMoji's table (Unicode's CLDR) where it is given, else of emoji.json.
    """
    tables = [packages["Noto"] / "emoji.json"]
    if "OpenMoji" in packages:
        tables.append(packages["OpenMoji"] / "data" / "openmoji.json")
    try:
        emoji = list(_emoji(*(json.loads(table.read_bytes()) for table in tables)))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        fault = f"{type(error).__name__}: {error}"
        raise ValueError(f"{' or '.join(map(str, tables))} is damaged ({fault}): get its package again") from None
    if not emoji:
        raise BadSource(f"no emoji in {tables[0]} has a picture in all packages: install all of them in one version")
    return emoji


def _emoji(rows: Sequence[dict[str, Any]], table: Sequence[dict[str, Any]] | None = None) -> Iterator[Emoji]:
    """Yield the emoji of emoji.json, named after OpenMoji's table where it is given."""
    drawings = None if table is None else {_bare(row["hexcode"]): row for row in table}
    for row in sorted(rows, key=lambda row: row["sort_order"]):
        # A package may have another vendor's picture where its vendor has none.
        if row["category"] == "Flags" or not _drawn_by_both(row):
            continue
        code = row["unified"]
        kind = row["subcategory"].replace("-", " ")
        if drawings is None:
            name, others = row["name"].lower(), [re.sub("[_-]", " ", word) for word in row["short_names"]]
            plain = Emoji(code, row["image"], name, kind, _keywords(name, others))
        elif (drawing := drawings.get(_bare(code))) is not None:
            name, others = drawing["annotation"], drawing["tags"].split(",")
            plain = Emoji(code, row["image"], name, kind, _keywords(name, others), drawing=drawing["hexcode"])
        else:
            continue
        yield plain
        yield from _skin_tones(plain, row.get("skin_variations", {}), drawings)


def _bare(code: str) -> str:
    """Return code points without the one that asks for a picture, which the packages use differently."""
    return code.replace("-FE0F", "")


def _drawn_by_both(row: dict[str, Any]) -> bool:
    return row["has_img_google"] and row["has_img_twitter"]


def _keywords(name: str, words: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in words if word.strip() not in ("", name)))


def _skin_tones(plain: Emoji, variations: dict[str, Any], drawings: dict[str, Any] | None) -> Iterator[Emoji]:
    """Yield the variants of an emoji that have one skin tone, whether it is one person's or that of all."""
    person, _, detail = plain.name.partition(": ")
    for point, tone in TONES.items():
        row = variations.get(point)
        drawing = None if row is None or drawings is None else drawings.get(_bare(row["unified"]))
        if row is None or not _drawn_by_both(row) or (drawings is not None and drawing is None):
            continue
        name = f"{person}: {tone} skin tone" + (f", {detail}" if detail else "")
        stem = drawing["hexcode"] if drawing else ""
        yield replace(plain, code=row["unified"], image=row["image"], name=name, tone=tone, drawing=stem)


def minimal_pairs(emoji: Sequence[Emoji], rng: np.random.Generator) -> list[tuple[str, Emoji, Emoji]]:
    """Return pairs of emoji that differ in one respect, each with its kind.

    The kinds are "skin tone", "gender", "role" and "activity" (two of men, or of women), "colour" and "direction". Of
    several emoji that differ in the same word, each is in one pair of the kind at most.
    """
    alike: dict[tuple, list[Emoji]] = defaultdict(list)
    for one in emoji:
        if one.tone:
            alike["skin tone", one.name.replace(one.tone, "", 1)].append(one)
            continue
        words = re.split(r"(\W+)", one.name)
        if one.kind in _DOING and words[0] in ("man", "woman") and not _FACING.search(one.name):
            alike[_DOING[one.kind], words[0]].append(one)
        alike["direction", _FACING.sub("", one.name)].append(one)
        for position, word in enumerate(words):
            for number, (kind, vocabulary) in enumerate(_WORDS):
                if word in vocabulary:
                    alike[kind, number, *words[:position], None, *words[position + 1 :]].append(one)
    pairs = []
    for (kind, *_), members in alike.items():
        order = [members[i] for i in rng.permutation(len(members))]
        pairs += [(kind, first, second) for first, second in zip(order[::2], order[1::2], strict=False)]
    return pairs

"""Units of answers, each written in one way: "sq. ft", "feet squared" and "ft^2" are "foot^2".

Units are names and are not converted: 60 minutes are not 1 hour.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NAMES = {
    "in": "inch", "ft": "foot", "feet": "foot", "yd": "yard", "mi": "mile", "mm": "millimeter", "cm": "centimeter",
    "m": "meter", "km": "kilometer", "g": "gram", "mg": "milligram", "kg": "kilogram", "oz": "ounce",
    "ml": "milliliter", "mL": "milliliter", "l": "liter", "L": "liter", "s": "second", "sec": "second",
    "min": "minute", "h": "hour", "hr": "hour", "yr": "year", "usd": "dollar", "eur": "euro", "gbp": "sterling",
    "penny": "cent", "pennie": "cent", "deg": "degree", "c": "celsius", "f": "fahrenheit",
    "people": "person", "men": "man", "women": "woman", "children": "child",
}  # fmt: skip
_WHOLE = {"mph": "mile/hour", "kph": "kilometer/hour", "kmh": "kilometer/hour"}
_POWERS_BEFORE = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
_POWERS_BEHIND = {"squared": "2", "cubed": "3"}
_WITHOUT_MEANING = {"left", "total", "altogether", "remaining", "old", "each", "more"}
# Words that are short for either.
_LOOSE = ({"lb", "pound"}, {"sterling", "pound"}, {"degree", "celsius"}, {"degree", "fahrenheit"})


def canonical(words: Sequence[str]) -> str:
    """Return a unit in the one way in which it is written; "" for none.

    Args:
        words: of it, in order, such as ["miles", "per", "hour"].
    """
    text = re.sub(r"\bin (?:total|all)\b|\bof\b.*|\.", "", " ".join(words))
    text = re.sub(r"\bper\s+cent\b", "percent", text)
    text = re.sub(r"\s*(?:/|\bper\b)\s*", " / ", text)
    parts: list[str] = []
    power = ""
    for word in text.split():
        match = re.fullmatch(r"([^\d^]*)\^?\{?([23]?)\}?", word)
        name, behind = (match[1], match[2]) if match else (word, "")
        if name.lower() in _POWERS_BEFORE:
            power = _POWERS_BEFORE[name.lower()]
        elif name.lower() in _POWERS_BEHIND and parts:
            parts[-1] += f"^{_POWERS_BEHIND[name.lower()]}"
        elif name.lower() not in _WITHOUT_MEANING:
            power, behind = "", behind or power
            parts.append(_singular(name) + (f"^{behind}" if behind else ""))
    parts = [part for part, before in zip(parts, ["", *parts], strict=False) if part != before]  # $5 dollars
    unit = " ".join(_WHOLE.get(part, part) for part in parts).replace(" / ", "/")
    return re.sub(r"^degree (?=celsius$|fahrenheit$|kelvin$)", "", unit)


def compatible(unit: str, other: str) -> bool:
    """Return whether two units are the same, or one is missing."""
    return not unit or not other or unit == other or {unit, other} in _LOOSE


def _singular(word: str) -> str:
    if word in _NAMES:
        return _NAMES[word]
    # MW is no mW.
    word = word.lower() if len(word) > 2 or word.lower() in _NAMES else word
    word = re.sub(r"(?<=[a-z])(me|li)tre(?=s?$)", r"\1ter", word)
    if len(word) > 2 and not word.endswith(("ss", "us")):
        word = re.sub(r"ies$", "y", word) if len(word) > 4 else word
        word = re.sub(r"(?<=ch|sh|ss)es$|(?<=[xz])es$|s$", "", word)
    return _NAMES.get(word, word)

"""Contexts that give words of a kind a made-up name: "pear: dax", "wolf: wug", "plum: dax", ...

The names of the kinds are drawn again for every context, so the mapping can only be learned from it. The synthetic form
of many-shot learning, in evaluation and in the training text of small models alike.
"""

from __future__ import annotations

import random

TEMPLATE = "{text}: {label}\n"
KINDS = {
    "fruit": "apple pear plum cherry grape lemon peach banana orange mango fig melon",
    "animal": "wolf bear lion horse sheep goat tiger rabbit mouse camel fox deer",
    "colour": "red blue green yellow purple brown pink grey white black violet scarlet",
    "tool": "hammer saw drill wrench chisel pliers spade rake axe shovel file clamp",
    "body": "hand foot knee elbow nose ear neck finger toe shoulder ankle wrist",
    "weather": "rain snow wind fog hail storm frost thunder cloud sleet mist breeze",
    "garment": "shirt coat hat scarf glove sock shoe dress skirt belt jacket boot",
    "room": "kitchen cellar attic bedroom hall pantry study nursery lounge porch garage stable",
}
NAMES = "dax wug blick toma fep zorp kiki gazzer modi lorp tulver pim"


def draw_mapping(draw: random.Random, classes: int) -> dict[str, str]:
    """Draw {kind: name} of `classes` kinds with different names."""
    return dict(zip(draw.sample(list(KINDS), classes), draw.sample(NAMES.split(), classes), strict=True))

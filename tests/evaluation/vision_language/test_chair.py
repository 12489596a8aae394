"""CHAIR on captions whose objects are known, and the names that captions are searched for."""

import math

import pytest

from diffvision.evaluation.intervals import differences
from diffvision.evaluation.per_sample import means
from diffvision.evaluation.vision_language.chair import ObjectNames, chair

COCO = ObjectNames(
    [
        "person, girl, boy, man, woman, baby, passenger",
        "train, locomotive",
        "hot dog",
        "dog, puppy",
        "chair, seat",
        "toilet",
        "tie",
        "knife",
        "bus",
        "teddy bear, teddy",
        "bear, panda",
        "",
    ]
)


@pytest.mark.parametrize(
    ("caption", "objects"),
    [
        ("Two women and a man's puppies.", ["person", "person", "dog"]),
        ("A hot dog, two hot dogs and a dog", ["hot dog", "hot dog", "dog"]),
        ("a baby dog by a passenger train with passengers", ["dog", "train", "person"]),
        ("The seat of a toilet. A toilet seat!", ["toilet", "toilet"]),
        ("a seat", ["chair"]),
        ("bow ties and knives on busses and buses", ["tie", "knife", "bus"]),
        ("a Teddy-bear next to a panda", ["teddy bear", "bear"]),
        ("people, dogma, bears", ["person", "bear"]),
        ("two baby animals on train tracks near a home plate", []),
        ("", []),
    ],
)
def test_objects_are_found_under_any_name(caption, objects):
    assert COCO.find(caption) == objects


# Names of objects with their plurals.
PLURALS = """
person people/persons, lady ladies, child children, grandchild grandchildren, man men, woman women, snowman snowmen,
thief thieves, wife wives, chef chefs, bike bikes, van vans, limo limos, bus buses, minibus minibuses, canoe canoes,
bench benches, goose geese, mongoose mongooses, canary canaries, ostrich ostriches, doberman dobermans, wolf wolves,
fox foxes, calf calves, ox oxen, buffalo buffalos/buffaloes, mouse mice/mouses, hoof hooves, foot feet, tooth teeth,
human humans, ottoman ottomans, tie ties, scarf scarves, dress dresses, ski skis, kite kites, kit kits, glass glasses,
wine_glass wine_glasses, cub cubs, cup cups, knife knives, pan pans, potato potatoes/potatos, sandwich sandwiches,
loaf loaves, leaf leaves, berry berries, shelf shelves, safe safes, roof roofs, quiz quizzes, stomach stomachs,
die dice, key keys, battery batteries, radio radios, tape tapes, star stars, fir firs, fire fires, mat mats, rat rats,
stop_sign stop_signs, cup_of_tea cups_of_tea, bow bows, cactus cacti/cactuses, suit suits, plan plans, pop pops
"""
# What adding "es", and "ves" for "f" and "fe", took for these.
OTHERS = """
skies cares vanes manes canes panes tubes cubes capes tapes pines kites stares plumes rates fires mates hates clothes
saves caves mans copes bowles suites planes popes ottomen humen dobermen mongeese
"""


def test_plurals_are_of_the_right_object_alone():
    pairs = [pair.split() for pair in PLURALS.replace("\n", " ").split(",")]
    words = {name.replace("_", " "): plurals.replace("_", " ").split("/") for name, plurals in pairs}
    for name, plurals in words.items():
        assert all(ObjectNames([name]).find(f"two {plural}") == [name] for plural in plurals), name
        strange = {*OTHERS.split()} - {*plurals}
        assert not [word for word in strange if ObjectNames([name]).find(word)], name


def test_plurals_of_names_in_a_file(tmp_path):
    (tmp_path / "names.txt").write_text("skis, ski\ncar, van\nperson, man, gentleman, grandchild\ndog, doberman\n")
    names = ObjectNames.read(tmp_path / "names.txt")
    assert names.find("blue skies, a man who cares, weather vanes, manes, one who mans it, dogmen") == ["person"]
    assert names.find("gentlemen, grandchildren, skis, dobermans, vans") == ["person", "person", "skis", "dog", "car"]
    others = ObjectNames(["зірка, зірки", "लड़का", "लड़की", "caf\u00e9", "💡, lamp"])
    assert others.find("зірки, एक लड़की, cafe\u0301 💡") == ["зірка", "लड़की", "caf\u00e9", "💡"]


def test_metrics_of_known_captions():
    captions = ["a dog and a dog and a cat", "a bus", "nothing at all"]
    names = ObjectNames(["dog", "cat", "bus"])
    metrics = means(chair(captions, [["dog", "bus"], ["bus"], ["cat"]], names))
    expected = {"chair_i": 1 / 4, "chair_s": 1 / 3, "recall": 2 / 4, "objects": 4 / 3, "words": 13 / 3}
    assert metrics == pytest.approx(expected)


def test_captions_without_objects_have_no_chair_i_and_objects_a_name():
    metrics = means(chair(["nothing"], [["dog"]], ObjectNames(["dog"])))
    assert math.isnan(metrics["chair_i"])
    assert (metrics["chair_s"], metrics["recall"]) == (0, 0)
    with pytest.raises(ValueError, match="'sofa'"):
        chair(["a dog"], [["dog", "sofa"]], COCO)


def test_the_difference_of_two_models_weighs_each_by_what_it_named():
    names, objects = ObjectNames(["dog", "cat"]), [["dog"]] * 20
    first = chair(["a dog and a cat"] * 20, objects, names)
    other = chair(["a dog, a dog, a dog and a cat"] * 10 + ["a dog"] * 10, objects, names)
    found = differences(first, other)
    assert found["chair_i_difference"] == pytest.approx(10 / 50 - 20 / 40)
    assert found["chair_i_difference_high"] < 0
    assert found["chair_s_mcnemar_p"] == pytest.approx(2 * 0.5**10)

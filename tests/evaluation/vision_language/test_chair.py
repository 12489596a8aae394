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
person people/persons, girl girls, boy boys, lady ladies, baby babies, child children, grandchild grandchildren,
man men, woman women, policeman policemen, snowman snowmen, thief thieves, wife wives, chef chefs, cop cops,
bicycle bicycles, bike bikes, car cars, van vans, taxi taxis, limo limos, jeep jeeps, coupe coupes,
bus buses, minibus minibuses, trolley trolleys, train trains, truck trucks, lorry lorries, jet jets,
plane planes, ship ships, ferry ferries, canoe canoes, yacht yachts, bench benches, pew pews, hydrant hydrants,
bird birds, goose geese, mongoose mongooses, finch finches, canary canaries, turkey turkeys, ostrich ostriches,
cat cats, kitty kitties, dog dogs, puppy puppies, husky huskies, doberman dobermans, wolf wolves, fox foxes,
horse horses, pony ponies, calf calves, ox oxen, buffalo buffalos/buffaloes, flamingo flamingos/flamingoes,
giraffe giraffes, mouse mice/mouses, hoof hooves, foot feet, tooth teeth, human humans, ottoman ottomans,
tie ties, scarf scarves, hat hats, cap caps, robe robes, cloth cloths, shoe shoes, glove gloves, dress dresses,
ski skis, kite kites, kit kits, bat bats, racket rackets, glass glasses, wine_glass wine_glasses, cup cups, cub cubs,
fork forks, knife knives, pocketknife pocketknives, dish dishes, bowl bowls, pan pans, pot pots, can cans, tub tubs,
potato potatoes/potatos, tomato tomatoes/tomatos, mango mangoes/mangos, sandwich sandwiches, loaf loaves,
leaf leaves, cherry cherries, berry berries, cake cakes, couch couches, sofa sofas, bed beds, desk desks, table tables,
shelf shelves, bookshelf bookshelves, safe safes, cafe cafes, roof roofs, cliff cliffs, carafe carafes, reef reefs,
box boxes, quiz quizzes, watch watches, toothbrush toothbrushes, brush brushes, stomach stomachs, die dice,
key keys, tray trays, toy toys, battery batteries, remote remotes, radio radios, video videos, piano pianos/pianoes,
pin pins, tap taps, tape tapes, star stars, plum plums, rat rats, fir firs, fire fires, mat mats,
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


def test_metrics_of_known_captions():
    captions = ["a dog and a dog and a cat", "a bus", "nothing at all"]
    names = ObjectNames(["dog", "cat", "bus"])
    metrics = means(chair(captions, [["dog", "bus"], ["bus"], ["cat"]], names))
    assert metrics["chair_i"] == pytest.approx(1 / 4)
    assert metrics["chair_s"] == pytest.approx(1 / 3)
    assert metrics["recall"] == pytest.approx(2 / 4)
    assert metrics["objects"] == pytest.approx(4 / 3)
    assert metrics["words"] == pytest.approx(13 / 3)


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

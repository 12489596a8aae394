"""CHAIR on captions whose objects are known, and the names that captions are searched for."""

import math

import pytest

from diffvision.evaluation.intervals import differences
from diffvision.evaluation.samples import means
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


def test_names_of_other_scripts_are_whole_words():
    names = ObjectNames(["लड़का", "लड़की", "caf\u00e9", "💡, lamp"])
    assert names.find("एक लड़की, cafe\u0301 💡") == ["लड़की", "caf\u00e9", "💡"]


def test_names_are_read_from_a_file_in_chairs_format(tmp_path):
    (tmp_path / "synonyms.txt").write_text("person, girl, boy\ntraffic light, stop light\n")
    assert ObjectNames.read(tmp_path / "synonyms.txt").find("Girls at stop lights") == ["person", "traffic light"]


def test_metrics_of_known_captions():
    captions = ["a dog and a dog and a cat", "a bus", "nothing at all"]
    names = ObjectNames(["dog", "cat", "bus"])
    metrics = means(chair(captions, [["dog", "bus"], ["bus"], ["cat"]], names))
    assert metrics["chair_i"] == pytest.approx(1 / 4)
    assert metrics["chair_s"] == pytest.approx(1 / 3)
    assert metrics["recall"] == pytest.approx(2 / 4)
    assert metrics["objects"] == pytest.approx(4 / 3)
    assert metrics["words"] == pytest.approx(13 / 3)


def test_captions_without_objects_have_no_chair_i():
    metrics = means(chair(["nothing"], [["dog"]], ObjectNames(["dog"])))
    assert math.isnan(metrics["chair_i"])
    assert (metrics["chair_s"], metrics["recall"]) == (0, 0)


def test_the_difference_of_two_models_weighs_each_by_what_it_named():
    names, objects = ObjectNames(["dog", "cat"]), [["dog"]] * 20
    first = chair(["a dog and a cat"] * 20, objects, names)
    other = chair(["a dog, a dog, a dog and a cat"] * 10 + ["a dog"] * 10, objects, names)
    found = differences(first, other)
    assert found["chair_i_difference"] == pytest.approx(10 / 50 - 20 / 40)
    assert found["chair_i_difference_high"] < 0
    assert found["chair_s_mcnemar_p"] == pytest.approx(2 * 0.5**10)


def test_an_object_without_a_name_is_refused():
    with pytest.raises(ValueError, match="'sofa'"):
        chair(["a dog"], [["dog", "sofa"]], COCO)


def test_names_in_other_alphabets():
    assert ObjectNames(["зірка, зірки", "коло", "hot_dog"]).find("Коло й зірки; a hot dog") == [
        "коло",
        "зірка",
        "hot dog",
    ]

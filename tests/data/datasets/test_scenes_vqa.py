"""Scenes of shapes with questions: what they promise of the truth, of balance, and of what tempts to hallucinate."""

import json
import re
from collections import Counter
from itertools import permutations

import pytest

from diffvision.data.datasets.scenes import COLOURS, LAYOUTS
from diffvision.data.datasets.scenes_vqa import DESCRIBE, HELD_OUT, SHAPES, make_scenes_vqa
from diffvision.data.make import make
from tests.data.conftest import read_tars

SCENES, EVALUATED = 250, 90
POPE = ("pope_random", "pope_popular", "pope_adversarial")
POSITIONS = {position for layout in LAYOUTS for position in layout.positions}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("made") / "scenes-vqa"
    make_scenes_vqa(directory, scenes=SCENES, evaluated=EVALUATED)
    return directory


def conversations(directory):
    return [json.loads(one["json"])["conversations"] for one in read_tars(directory)]


def rows(made, name):
    return [json.loads(line) for line in (made / "test" / f"{name}.json").read_text().splitlines()]


def truth(text):
    """(shape, colour) of each drawing that a caption names."""
    return {(kind, colour) for colour, kind in re.findall(rf"({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})", text)}


def answers(conversation):
    """{question: answer} of a conversation."""
    texts = [turn["value"].removeprefix("<image>\n") for turn in conversation]
    return dict(zip(texts[::2], texts[1::2], strict=True))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_answer_of_a_conversation_follows_from_its_caption(made, split):
    given = Counter()
    for conversation in conversations(made / split):
        assert [turn["from"] for turn in conversation] == ["human", "gpt"] * 5
        assert conversation[0]["value"].startswith("<image>\n")
        assert sum(turn["value"].count("<image>") for turn in conversation) == 1
        asked = answers(conversation)
        shown = dict(truth(asked.pop(DESCRIBE)))
        assert not HELD_OUT & set(shown.items())
        for question, answer in asked.items():
            if match := re.fullmatch(r"Is there an? (\w+) in the image\?", question):
                assert answer == ("yes" if match[1] in shown else "no")
            elif question == "How many shapes are there?":
                assert int(answer) == len(shown)
            elif match := re.fullmatch(r"What colour is the (\w+)\?", question):
                assert answer == shown[match[1]]
            elif match := re.fullmatch(r"What shape is (\w+)\?", question):
                assert shown[answer] == match[1]
            else:
                assert re.fullmatch(r"Where is the (\w+)\?", question)[1] in shown
                assert answer in POSITIONS
            given[answer] += 1
    assert abs(given["yes"] / (given["yes"] + given["no"]) - 0.5) < 0.07


@pytest.mark.parametrize("name", POPE)
def test_pope_asks_as_often_for_what_is_there_as_for_what_is_not(made, name):
    objects = {row["image"]: row["objects"] for row in rows(made, "captions")}
    asked = {}
    for number, row in enumerate(rows(made, name), start=1):
        assert row["question_id"] == number
        kind = re.fullmatch(r"Is there an? (\w+) in the image\?", row["text"])[1]
        assert row["label"] == ("yes" if kind in objects[row["image"]] else "no")
        asked.setdefault(row["image"], []).append((kind, row["label"]))
    assert asked.keys() == objects.keys()
    for image, questions_of in asked.items():
        labels = Counter(label for _, label in questions_of)
        assert labels == {"yes": len(objects[image]), "no": len(objects[image])}
        assert len({kind for kind, _ in questions_of}) == len(questions_of)


def test_negatives_are_those_that_training_makes_likely(made):
    captions = [answers(conversation)[DESCRIBE] for conversation in conversations(made / "train")]
    scenes = [sorted(dict(truth(caption))) for caption in captions]
    counts = Counter(kind for scene in scenes for kind in scene)
    pairs = Counter(pair for scene in scenes for pair in permutations(scene, 2))
    objects = {row["image"]: row["objects"] for row in rows(made, "captions")}
    negatives = {name: {image: [] for image in objects} for name in POPE}
    for name in POPE:
        for row in rows(made, name):
            if row["label"] == "no":
                negatives[name][row["image"]].append(row["text"].split()[3])
    for image, present in objects.items():
        absent = [kind for kind in SHAPES if kind not in present]
        by_count = sorted(absent, key=lambda kind: -counts[kind])
        assert negatives["pope_popular"][image] == by_count[: len(present)]
        first = negatives["pope_adversarial"][image][0]
        assert pairs[present[0], first] == max(pairs[present[0], kind] for kind in absent)
    chosen = Counter(kind for kinds in negatives["pope_random"].values() for kind in kinds)
    assert max(chosen.values()) < 3 * min(chosen.values())


def test_rows_say_which_images_have_a_combination_that_training_lacks(made):
    held_out = {row["image"]: bool(truth(row["caption"]) & HELD_OUT) for row in rows(made, "captions")}
    assert 0.1 < sum(held_out.values()) / EVALUATED < 0.6
    for name in (*POPE, "vqa", "captions"):
        assert all(row["held_out"] is held_out[row["image"]] for row in rows(made, name))
    assert {kind for kind, _ in HELD_OUT} == set(SHAPES)


def test_the_seed_determines_all_of_it(tmp_path):
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        assert make("scenes-vqa", tmp_path / name, scenes=100, evaluated=9, seed=seed) == 0
    one = tmp_path / "one"
    for path in [*one.rglob("*.tar"), *one.rglob("test/*.json"), *one.rglob("*.png")]:
        inside = path.relative_to(one)
        assert (tmp_path / "same" / inside).read_bytes() == path.read_bytes()
        assert (tmp_path / "other" / inside).read_bytes() != path.read_bytes()

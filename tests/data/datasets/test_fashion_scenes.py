"""Scenes of garments of a miniature of Fashion-MNIST: splits, captions, truth."""

import json
import re
from collections import Counter

import numpy as np
import pytest
import torch
import webdataset
from fashion_files import write_miniature

from diffvision.data import EvaluationFolder
from diffvision.data.datasets import fashion_scenes
from diffvision.data.datasets.fashion import WORDS, load_splits
from diffvision.data.datasets.fashion_scenes import COMPOSITION, KIND_TEMPLATES, PAIRS, make_fashion_scenes
from diffvision.data.datasets.scenes import COLOURS, LAYOUTS, draw_scene
from diffvision.data.images.decode import decode_image

EVALUATED = 40


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(write_miniature(tmp_path_factory.mktemp("source"), ".gz"))


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    directory = tmp_path_factory.mktemp("made") / "scenes"
    make_fashion_scenes(directory, source, scenes=220, evaluated=EVALUATED)
    return directory


def samples_of(directory):
    tars = sorted(map(str, directory.glob("*.tar")))
    return list(webdataset.WebDataset(tars, shardshuffle=False, empty_check=False))


def truth_of(sample):
    return json.loads(sample["json"])


def kinds_in(text):
    return {word for word in WORDS if re.search(rf"(?<![\w-]){word}", text)}


def test_no_garment_is_in_two_splits(made):
    numbers = {"train": range(110), "validation": range(110, 120), "test": range(120, 140)}
    shown = {split: set() for split in numbers}
    for tar in made.rglob("0*.tar"):
        for sample in samples_of(tar.parent):
            truth = truth_of(sample)
            for scene in truth.get("scenes", [truth]):
                shown[tar.parent.name] |= {garment["number"] for garment in scene["garments"]}
    assert shown["train"] == set(numbers["train"])  # with 220 scenes each is in two of them
    for split in ("validation", "test"):
        assert shown[split] == set(numbers[split])


def test_training_captions_say_what_the_truth_has(made):
    counted, coloured, named = Counter(), 0, 0
    for sample in samples_of(made / "train"):
        caption, truth = sample["txt"].decode(), truth_of(sample)
        kinds = {garment["kind"] for garment in truth["garments"]}
        colours = {garment["colour"] for garment in truth["garments"]}
        if len(kinds) < truth["count"]:  # a group
            assert len(kinds) == len(colours) == 1
            assert caption.split()[0] == {2: "two", 3: "three"}[truth["count"]]
            counted["groups"] += 1
        described, _, background = caption.partition(", on a")
        assert kinds_in(described) == kinds
        in_words = set(described.replace(",", "").split()) & set(COLOURS)
        assert in_words in (set(), colours)
        coloured += bool(in_words)
        if background:
            assert background.split()[-2:] == [truth["background"], "background"]
            named += 1
        assert len({tuple(garment["centre"]) for garment in truth["garments"]}) == truth["count"]
        assert truth["layout"] == ", ".join(garment["position"] for garment in truth["garments"])
        counted[truth["count"]] += 1
    assert all(counted[key] > 10 for key in ("groups", 1, 2, 3))
    assert 0.6 < coloured / 220 < 0.9
    assert 0.35 < named / 220 < 0.65


def test_zero_shot_folders_label_the_same_images_by_kind_colour_and_background(made):
    factors = {
        "zero_shot": lambda truth: truth["garments"][0]["kind"],
        "zero_shot-colour": lambda truth: truth["garments"][0]["colour"],
        "zero_shot-background": lambda truth: truth["background"],
    }
    images = []
    for name, factor in factors.items():
        folder = EvaluationFolder(made / name)
        assert (folder.task, folder.splits) == ("zero_shot", ["test", "train", "validation"])
        assert all(template.count("{c}") == 1 for template in folder.templates)
        samples = samples_of(made / name / "test")
        assert [folder.classnames[int(sample["cls"])] for sample in samples] == [factor(truth_of(s)) for s in samples]
        assert len({sample["cls"] for sample in samples}) == len(folder.classnames)
        images.append([sample["png"] for sample in samples])
    assert images[0] == images[1] == images[2]
    assert len(images[0]) == EVALUATED
    assert len(samples_of(made / "zero_shot" / "train")) == 2 * EVALUATED
    trained = {s.replace("{0}", "a {c}") for layout in LAYOUTS for s in layout.sentences}
    assert not trained & set(KIND_TEMPLATES)


def test_wrong_captions_of_composition_differ_as_their_kind_says(made):
    kinds = Counter()
    for sample in samples_of(made / "composition" / "test"):
        (right, wrong), truth = sample["txt"].decode().splitlines(), truth_of(sample)
        kinds[truth["kind"]] += 1
        assert right != wrong
        words = [Counter(re.findall(r"(?!an?\b)[\w-]+", text)) for text in (right, wrong)]
        if truth["kind"].startswith("swapped"):
            assert words[0] == words[1]
        elif truth["kind"] == "absent object":
            shown = {garment["kind"] for garment in truth["garments"]}
            assert kinds_in(right) == shown
            assert len(kinds_in(wrong) - shown) == len(shown - kinds_in(wrong)) == 1
        else:
            numbers = {1: ("a", "an"), 2: ("two",), 3: ("three",)}
            assert right.split()[0] in numbers.pop(truth["count"])
            assert any(wrong.split()[0] in others for others in numbers.values())
    assert kinds == {kind: EVALUATED // len(COMPOSITION) for kind in COMPOSITION}


def test_the_two_images_of_a_pair_differ_and_share_their_background(made):
    for sample in samples_of(made / "pairs" / "test"):
        truth = truth_of(sample)
        assert truth["kind"] in PAIRS
        first, second = (np.asarray(decode_image(sample[f"{i}.png"])).astype(int) for i in (0, 1))
        assert sample["0.txt"] != sample["1.txt"]
        assert 0 < (first != second).any(axis=2).mean() < 0.9
        assert truth["scenes"][0]["background"] == truth["scenes"][1]["background"]
        described = [
            Counter((g["kind"], g["colour"], g["position"]) for g in scene["garments"]) for scene in truth["scenes"]
        ]
        assert described[0] != described[1]


def test_objects_name_as_many_kinds_that_are_absent(made):
    for sample in samples_of(made / "objects" / "validation"):
        truth = truth_of(sample)
        assert truth["present"] == [garment["kind"] for garment in truth["garments"]]
        assert len(truth["absent"]) == len(truth["present"]) == truth["count"]
        assert not set(truth["absent"]) & set(truth["present"])


def test_an_evaluation_sample_is_a_function_of_the_seed_and_its_number(made, source):
    garments = load_splits(source)["test"]
    for folder in ("composition", "pairs", "objects", "retrieval"):
        written = samples_of(made / folder / "test")[:7]
        for seed, same in ((0, True), (1, False)):
            # fewer than were written, and nothing else before them
            again = list(getattr(fashion_scenes.Scenes(garments, [seed, 33]), folder)(7))
            members = {name for name in again[0] if name[0] != "_"}
            encoded = [
                {k: v.encode() if isinstance(v, str) else v for k, v in s.items() if k in members} for s in again
            ]
            assert ([{k: s[k] for k in members} for s in written] == encoded) is same


def test_shards_are_not_overwritten_and_no_scenes_are_refused(made, source, tmp_path):
    before = (made / "about.json").read_text()
    with pytest.raises(ValueError, match="has shards already"):
        make_fashion_scenes(made, source, scenes=1)
    assert (made / "about.json").read_text() == before
    with pytest.raises(ValueError, match="scenes is 0"):
        make_fashion_scenes(tmp_path / "c", source, scenes=0)


def test_masks_are_of_the_garments_in_their_pictures(source):
    made = fashion_scenes.Scenes(load_splits(source)["test"], [0, 33])
    shown = list(made.masked(12))
    for index, (pixels, mask) in enumerate(shown):
        rng = made._rng("masks", index)
        scene, state = made._scene(rng, (1, 2, 3)), rng.bit_generator.state
        drawn, rng.bit_generator.state = decode_image(draw_scene(scene, made.garments, rng)), state
        empty = np.asarray(decode_image(draw_scene(scene.emptied(), made.garments, rng)))
        assert np.array_equal(pixels, np.asarray(drawn))
        changed = (np.asarray(drawn) != empty).any(axis=2)
        assert changed[mask].all()
        near = torch.nn.functional.max_pool2d(torch.from_numpy(mask)[None].float(), 3, 1, padding=1)[0].bool().numpy()
        assert not changed[~near].any()  # edges are seen through
    assert len({pixels.tobytes() for pixels, _ in shown}) == 12

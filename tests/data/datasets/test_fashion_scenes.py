"""Scenes of garments of a miniature of Fashion-MNIST: splits, captions, truth."""

import json
import re
from collections import Counter

import numpy as np
import pytest
import torch
from fashion_files import write_miniature

from diffvision.data import EvaluationFolder
from diffvision.data.datasets import fashion_scenes
from diffvision.data.datasets.fashion import WORDS, load_splits
from diffvision.data.datasets.fashion_scenes import make_fashion_scenes
from diffvision.data.datasets.scenes import COLOURS, draw_scene
from diffvision.data.images.decode import decode_image
from tests.data.conftest import read_tars

EVALUATED = 40


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(write_miniature(tmp_path_factory.mktemp("source"), ".gz"))


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    directory = tmp_path_factory.mktemp("made") / "scenes"
    make_fashion_scenes(directory, source, scenes=220, evaluated=EVALUATED)
    return directory


def truth_of(sample):
    return json.loads(sample["json"])


def kinds_in(text):
    return {word for word in WORDS if re.search(rf"(?<![\w-]){word}", text)}


def test_no_garment_is_in_two_splits(made):
    numbers = {"train": range(110), "validation": range(110, 120), "test": range(120, 140)}
    shown = {split: set() for split in numbers}
    for tar in made.rglob("0*.tar"):
        for sample in read_tars(tar.parent):
            shown[tar.parent.name] |= {garment["number"] for garment in truth_of(sample)["garments"]}
    assert shown["train"] == set(numbers["train"])  # with 220 scenes each is in two of them
    for split in ("validation", "test"):
        assert shown[split] == set(numbers[split])


def test_training_captions_say_what_the_truth_has(made):
    counted, coloured, named = Counter(), 0, 0
    for sample in read_tars(made / "train"):
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


def test_evaluation_folders_say_what_the_truth_has(made):
    folder = EvaluationFolder(made / "zero_shot-colour")
    assert (folder.task, folder.splits) == ("zero_shot", ["test", "train", "validation"])
    assert all(template.count("{c}") == 1 for template in folder.templates)
    for split, count in (("train", 2 * EVALUATED), ("test", EVALUATED)):
        samples = read_tars(made / "zero_shot-colour" / split)
        assert len(samples) == count
        colours = [truth_of(sample)["garments"][0]["colour"] for sample in samples]
        assert [folder.classnames[int(sample["cls"])] for sample in samples] == colours
    assert EvaluationFolder(made / "retrieval-colour").task == "retrieval"
    captions = {sample["txt"].decode() for sample in read_tars(made / "retrieval-colour" / "test")}
    assert len(captions) == 360


def test_an_evaluation_sample_is_a_function_of_the_seed_and_its_number(made, source):
    garments = load_splits(source)["test"]
    written = [sample["png"] for sample in read_tars(made / "zero_shot-colour" / "test")[:7]]
    for seed, same in ((0, True), (1, False)):
        again = [sample["png"] for sample in fashion_scenes.Scenes(garments, [seed, 33]).single(7)]
        assert (again == written) is same


def test_shards_are_not_overwritten_and_no_scenes_are_refused(made, source, tmp_path):
    with pytest.raises(ValueError, match="has shards already"):
        make_fashion_scenes(made, source, scenes=1)
    with pytest.raises(ValueError, match="scenes"):
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

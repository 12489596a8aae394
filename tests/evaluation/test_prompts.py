"""ImageNet's classes and templates, and its variants as subsets of them."""

import random
from pathlib import Path

import open_clip
import pytest
import torch
from PIL import Image
from timm.data import ImageNetInfo

from diffvision.data.images.folders import find_folders
from diffvision.evaluation.options import Options
from diffvision.evaluation.prompts import Prompts, check_prompts, imagenet, local_labels, prompts_of

WNIDS = ImageNetInfo().label_names()


@pytest.mark.parametrize(
    ("name", "first", "synset"), [("imagenet-a", "stingray", "n01498041"), ("imagenet-r", "goldfish", "n01443537")]
)
def test_variants_have_a_part_of_the_classes_in_both_numberings(name, first, synset):
    prompts = imagenet(name)
    assert len(prompts.classnames) == len(prompts.indices) == 200
    assert prompts.indices == sorted(prompts.indices)
    assert prompts.classnames[0] == first
    assert WNIDS[prompts.indices[0]] == synset
    within = torch.tensor([0, 5, 199])
    assert torch.equal(local_labels(within, prompts, name), within)
    assert torch.equal(local_labels(torch.tensor(prompts.indices)[within], prompts, name), within)
    first = next(i for i, number in enumerate(prompts.indices) if number >= 200)
    assert local_labels(torch.tensor([prompts.indices[first]]), prompts, name).tolist() == [first]
    outside = next(i for i in range(300, 1000) if i not in prompts.indices)
    with pytest.raises(ValueError, match="sample 1"):
        local_labels(torch.tensor([prompts.indices[0], outside]), prompts, name)


def test_a_folder_is_completed_by_its_name(memory_folder):
    folder = memory_folder("zero_shot", {}, name="imagenet-a")
    assert prompts_of(folder) == imagenet("imagenet-a")
    folder.classnames, folder.templates = [f"class {i}" for i in range(1000)], ["a {c}"]
    restricted = prompts_of(folder)
    assert restricted.classnames[:2] == ["class 6", "class 11"]
    assert restricted.templates == ["a {c}"]
    folder.classnames = [f"own {i}" for i in range(200)]
    assert prompts_of(folder) == Prompts(folder.classnames, ["a {c}"], imagenet("imagenet-a").indices)


def test_other_folders_need_names_and_templates(memory_folder):
    folder = memory_folder("zero_shot", {}, name="birds", templates=["a {c}"])
    with pytest.raises(ValueError, match=r"'birds'.*classnames\.txt"):
        prompts_of(folder)
    folder.classnames, folder.templates = ["wren"], None
    with pytest.raises(ValueError, match=r"zeroshot_classification_templates"):
        prompts_of(folder)


def test_a_template_s_place_is_replaced_and_nothing_is_evaluated_or_multiplied():
    templates = ["a {c}", "{c} {c.__class__} {0} {{c}}", "{c} {", "{c} 100%"]
    assert Prompts(["{c} wren", "{0}"], templates, None).texts() == [
        ["a {c} wren", "{c} wren {c.__class__} {0} {{c} wren}", "{c} wren {", "{c} wren 100%"],
        ["a {0}", "{0} {c.__class__} {0} {{0}}", "{0} {", "{0} 100%"],
    ]
    for template in ("a {c:>3000000000}", "a photo", ""):
        with pytest.raises(ValueError, match=r"template .*\{c\}"):
            Prompts(["wren"], ["a {c}", template], None).texts()
    with pytest.raises(ValueError, match="3,000,000,000"):
        Prompts(["wren", "w" * 100_000], ["{c}" * 30_000], None).texts()


def pictures(root: Path, classes: list[str]) -> Path:
    """A picture in a folder for each class."""
    for name in classes:
        (root / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(root / name / "1.png")
    return root


def test_folders_of_wnids_have_the_names_and_templates_of_imagenet(tmp_path):
    """The whole, or a part such as Imagenette, whatever its folder is called; read in place."""
    wnids = sorted(random.Random(0).sample(WNIDS, 5))
    pictures(tmp_path / "mine/val", wnids)
    (folder,) = find_folders(tmp_path / "mine")
    prompts = prompts_of(folder)
    assert prompts.classnames == [open_clip.IMAGENET_CLASSNAMES[WNIDS.index(wnid)] for wnid in wnids]
    assert len(prompts.templates) == 80
    labels = torch.arange(5)
    assert torch.equal(local_labels(labels, prompts, "mine"), labels)
    (line,) = check_prompts([(folder, ["zero_shot"])], Options())
    assert "zero_shot/mine: 5 classes, 80 templates, e.g. 'a photo of a " in line


@pytest.mark.parametrize(
    "classes",
    [["n01440764", "n99999999"], ["n01440764", "other"], ["N01440764", "N01443537"], ["n02085620-Chihuahua", "n0-x"]],
)
def test_other_wnids_are_no_prompts(classes, memory_folder, tmp_path):
    folder = memory_folder("zero_shot", {}, classnames=classes, templates=["a {c}"])
    with pytest.raises(ValueError, match=r"--classnames FILE"):
        prompts_of(folder)
    (tmp_path / "names").write_text("fish\nentity\n")
    assert prompts_of(folder, Options(classnames=str(tmp_path / "names"))).classnames == ["fish", "entity"]
    folder.own_names = ["shark", "thing"]
    assert prompts_of(folder).classnames == ["shark", "thing"]


def test_numbers_are_imagenet_s_only_if_asked(memory_folder):
    numbers = sorted(map(str, range(1000)))  # as folders are sorted: 0, 1, 10, 100, 101
    folder = memory_folder("zero_shot", {}, name="imagenet", classnames=numbers, templates=["a photo of a {c}."])
    with pytest.warns(UserWarning, match="--classnames imagenet"):
        lines = check_prompts([(folder, ["zero_shot"])], Options())
    assert lines == ["zero_shot/imagenet: 1,000 classes, 1 template, e.g. 'a photo of a 0.'"]
    prompts = prompts_of(folder, Options(classnames="imagenet"))
    assert len(prompts.templates) == 80
    assert prompts.classnames == [open_clip.IMAGENET_CLASSNAMES[int(number)] for number in numbers]
    folder.classnames = ["10", "9", "101"]
    assert prompts_of(folder, Options(classnames="imagenet")).classnames == ["brambling", "ostrich", "tusker"]


def test_own_names_are_in_the_order_of_numbers_or_of_the_classes(tmp_path):
    pictures(tmp_path, ["1", "10", "2"])
    (tmp_path / "classnames.txt").write_text("one\ntwo\nten\n")
    (tmp_path / "zeroshot_classification_templates.txt").write_text("the {c}\n")
    (folder,) = find_folders(tmp_path)
    assert prompts_of(folder).texts() == [["the one"], ["the ten"], ["the two"]]
    options = Options(classnames=["un", "deux", "dix"], templates=["le {c}", "la {c}"])
    assert prompts_of(folder, options).texts()[1] == ["le dix", "la dix"]


@pytest.mark.parametrize(
    ("classes", "options", "named"),
    [
        (["cat", "dog"], Options(classnames="imagenet"), "'cat'"),
        (["cat", "dog"], Options(classnames=["cat"]), "1 names"),
        (["0", "1000"], Options(classnames="imagenet"), "1,000 names"),
        (["cat", "dog"], Options(classnames="no/such/file"), "classnames is 'no/such/file'"),
        (["cat", "dog"], Options(templates="a photo"), r"templates is 'a photo'"),
    ],
)
def test_names_and_templates_that_do_not_fit_are_refused(classes, options, named, memory_folder):
    folder = memory_folder("zero_shot", {}, classnames=classes, templates=["a {c}"])
    with pytest.raises(ValueError, match=named):
        prompts_of(folder, options)

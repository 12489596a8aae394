"""ImageNet's classes and templates, and its variants as subsets of them."""

import pytest
import torch
from timm.data import ImageNetInfo

from diffvision.evaluation.prompts import Prompts, imagenet, local_labels, prompts_of


@pytest.mark.parametrize(("name", "count"), [("imagenet", 1000), ("imagenet-v2", 1000), ("ImageNet_Sketch", 1000)])
def test_variants_with_all_classes(name, count):
    prompts = imagenet(name)
    assert len(prompts.classnames) == count
    assert prompts.indices is None
    assert len(prompts.templates) == 80
    assert len(imagenet(name, "simple").templates) == 7
    assert prompts.texts()[0][0] == "a bad photo of a tench."


@pytest.mark.parametrize(
    ("name", "first", "synset"), [("imagenet-a", "stingray", "n01498041"), ("imagenet-r", "goldfish", "n01443537")]
)
def test_variants_with_a_part_of_the_classes(name, first, synset):
    prompts = imagenet(name)
    assert len(prompts.classnames) == len(prompts.indices) == 200
    assert prompts.indices == sorted(prompts.indices)
    assert prompts.classnames[0] == first
    assert ImageNetInfo().label_names()[prompts.indices[0]] == synset


def test_unknown_variant():
    with pytest.raises(ValueError, match="'imagenet-z' is no variant"):
        imagenet("imagenet-z")


def test_labels_of_a_subset_in_both_numberings():
    prompts = imagenet("imagenet-r")
    within = torch.tensor([0, 5, 199])
    assert torch.equal(local_labels(within, prompts, "imagenet-r"), within)
    among_all = torch.tensor([prompts.indices[i] for i in within])
    assert torch.equal(local_labels(among_all, prompts, "imagenet-r"), within)
    outside = next(i for i in range(300, 1000) if i not in prompts.indices)
    with pytest.raises(ValueError, match=r"sample 1 has the label [0-9]+, outside its 200 classes"):
        local_labels(torch.tensor([prompts.indices[0], outside]), prompts, "imagenet-r")


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
    with pytest.raises(ValueError, match=r"'birds' has no classnames.txt"):
        prompts_of(folder)
    folder.classnames, folder.templates = ["wren"], None
    with pytest.raises(ValueError, match=r"zeroshot_classification_templates.txt"):
        prompts_of(folder)


def test_zero_shot_over_a_subset(circle, to_tensor, memory_folder):
    """A model that tells ImageNet's classes apart, on a folder whose labels are numbered among all 1000."""
    from diffvision.evaluation.suite import evaluate

    prompts = imagenet("imagenet-a")
    folder = memory_folder(
        "zero_shot", {"test": [(5, prompts.indices[5]), (250, prompts.indices[50])]}, name="imagenet-a"
    )

    def grey_of_class(texts):
        return torch.tensor(
            [[next(i for i, name in enumerate(prompts.classnames) if f" {name}" in text)] for text in texts]
        )

    folder.templates = ["a {c}"]
    folder.classnames = [f"c{i:04}" for i in range(1000)]
    prompts = prompts_of(folder)
    metrics = evaluate(circle, folder, transform=to_tensor, tokenizer=grey_of_class)
    assert metrics["zero_shot/imagenet-a/acc1"] == 0.5


def test_a_template_s_place_is_replaced_and_nothing_is_evaluated():
    templates = ["a {c}", "{c} {c.__class__} {0} {{c}}", "{c} {", "{c} 100%"]
    assert Prompts(["{c} wren", "{0}"], templates, None).texts() == [
        ["a {c} wren", "{c} wren {c.__class__} {0} {{c} wren}", "{c} wren {", "{c} wren 100%"],
        ["a {0}", "{0} {c.__class__} {0} {{0}}", "{0} {", "{0} 100%"],
    ]


@pytest.mark.parametrize(
    "template", ["a {c:>3000000000}", "a {c.__class__}", "a {c!r}", "a {}", "a {name}", "a photo", ""]
)
def test_a_template_without_a_place_is_refused(template):
    with pytest.raises(ValueError, match=r"the template .* has no \{c\}, the place of the class name: add it"):
        Prompts(["wren"], ["a {c}", template], None).texts()


def test_a_template_cannot_multiply_a_name():
    with pytest.raises(ValueError, match=r"make a text of 3,000,000,000 characters: shorten them to 1,000 or fewer"):
        Prompts(["wren", "w" * 100_000], ["{c}" * 30_000], None).texts()

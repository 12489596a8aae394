"""Accuracy by a model's own classifier."""

import pytest
import timm
import torch
from PIL import Image

from diffvision.evaluation import Options, evaluate
from diffvision.evaluation.suite import plan


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return timm.create_model("diff_vit_debug", num_classes=3)


def transform(image):
    return torch.full((3, 32, 32), image.getpixel((0, 0))[0] / 255)


def test_is_the_accuracy_of_the_model_s_logits(model, memory_folder):
    shades = range(0, 250, 25)
    images = torch.stack([transform(Image.new("RGB", (8, 8), (grey,) * 3)) for grey in shades])
    with torch.no_grad():
        answers = model.eval()(images).argmax(dim=1).tolist()
    labels = [answers[0], *((answer + 1) % 3 for answer in answers[1:4]), *answers[4:]]
    folder = memory_folder("zero_shot", {"test": list(zip(shades, labels, strict=True))})
    metrics = evaluate(model.train(), folder, ["classification"], transform=transform, batch_size=4)
    assert metrics["classification/memory/acc1"] == 0.7
    assert model.training
    assert plan([folder], ["classification"], Options()) == [(folder, ["classification"])]  # no training split needed
    assert plan([folder], None, Options()) == [(folder, ["zero_shot"])]


def test_more_outputs_than_the_folder_has_classes_is_a_warning(model, memory_folder):
    folder = memory_folder("zero_shot", {"test": [(0, 0), (100, 1)]}, classnames=["a", "b"])
    with pytest.warns(UserWarning, match="3 outputs"):
        evaluate(model, folder, ["classification"], transform=transform)


def test_what_has_no_such_classifier(model, memory_folder):
    folder = memory_folder("zero_shot", {"test": [(0, 0), (100, 3)]})
    with pytest.raises(ValueError, match="label 3"):
        evaluate(model, folder, ["classification"], transform=transform)
    with pytest.raises(ValueError, match="VisionTransformer"):
        evaluate(timm.create_model("diff_vit_debug", num_classes=0), folder, ["classification"], transform=transform)


@pytest.mark.parametrize(
    ("classes", "options", "outputs"),
    [(["n01443537", "n03888257"], Options(), [1, 701]), (["10", "9"], Options(classnames="imagenet"), [10, 9])],
)
def test_a_model_of_imagenet_is_measured_by_its_outputs_for_a_part_of_the_classes(
    classes, options, outputs, memory_folder
):
    torch.manual_seed(0)
    model = timm.create_model("diff_vit_debug", num_classes=1000).eval()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()[outputs[0]] = 2.0
        model.head.bias[outputs[1]] = 1.0
    folder = memory_folder("zero_shot", {"test": [(0, 0), (100, 1)]}, classnames=classes)
    metrics = evaluate(model, folder, ["classification"], transform=transform, options=options)
    assert (metrics["classification/memory/acc1"], metrics["classification/memory/acc5"]) == (0.5, 1.0)

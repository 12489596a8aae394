"""The weights in the package: loaded by timm's and OpenCLIP's names, and as docs/results/bundled.csv says."""

import csv
from pathlib import Path

import open_clip
import pytest
import timm
import torch
from safetensors.torch import load_file

import diffvision
from diffvision import open_model
from diffvision.data.datasets.digits import make_digits
from diffvision.export.export_commands import export
from diffvision.models.bundled import WEIGHTS, bundled
from diffvision.models.parameters import names

DOCS = Path(__file__).parents[2] / "docs"
with (DOCS / "results" / "bundled.csv").open(encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))
SPECS = list(dict.fromkeys(row["model"] for row in ROWS))
VISION = [spec for spec in SPECS if spec.endswith(".digits")]


def has_weights(model, file):
    """Whether a model has the tensors of a file."""
    state, expected = model.state_dict(), load_file(file)
    return state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)


def test_the_table_is_of_the_weights_of_the_package():
    found = {
        f"{name}.{tag}": path for listed in names().values() for name in listed for tag, path in bundled(name).items()
    }
    assert set(SPECS) == set(found)
    assert sum(path.stat().st_size for path in WEIGHTS.rglob("*") if path.is_file()) <= 6_000_000
    for spec, path in found.items():
        card = (path / "README.md" if path.is_dir() else path.with_suffix(".md")).read_text(encoding="utf-8")
        opened = open_model(spec)
        parameters = sum(parameter.numel() for parameter in opened.module.parameters())
        assert not opened.is_language or opened.tokenizer.vocab_size == opened.module.config.vocab_size
        for row in (row for row in ROWS if row["model"] == spec):
            numbers = f"{row['value']} [{row['low']}, {row['high']}]" if row["low"] else row["value"]
            assert f"| `{spec}` | {row['metric']} | {numbers} |" in card
            assert int(row["parameters"]) == parameters


@pytest.mark.parametrize("name", ["diff_vit_debug", "plain_vit_debug"])
def test_timm_loads_them_by_tag_and_by_default(name):
    """As of timm's own models: a name without a tag is that of its first weights, with their number of classes."""
    file = WEIGHTS / f"{name}.digits.safetensors"
    for spec in (name, f"{name}.digits"):
        model = timm.create_model(spec, pretrained=True)
        assert model.num_classes == 10
        assert has_weights(model, file)
    assert not has_weights(timm.create_model(name), file)
    kept = timm.create_model(name, pretrained=True, num_classes=7).state_dict()
    assert torch.equal(kept["patch_embed.proj.weight"], load_file(file)["patch_embed.proj.weight"])


@pytest.mark.parametrize("name", ["CLIP-nano", "DiffCLIP-nano"])
def test_open_clip_loads_them_by_tag(name):
    model, _, transform = open_clip.create_model_and_transforms(name, pretrained="digits")
    assert has_weights(model, WEIGHTS / f"{name}.digits.safetensors")
    assert "mean=[0.33, 0.33, 0.33]" in str(transform)


@pytest.mark.slow
def test_an_export_has_no_path_of_the_machine(tmp_path):
    for spec in SPECS:
        export(spec, str(tmp_path / spec))
        content = b"".join(path.read_bytes() for path in (tmp_path / spec).iterdir())
        assert str(WEIGHTS.parents[1]).encode() not in content
        assert str(tmp_path).encode() not in content


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    root = tmp_path_factory.mktemp("digits") / "digits"
    make_digits(root, copies=1)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("spec", VISION)
def test_evaluate_prints_the_values_of_the_table(spec, digits, capsys):
    tasks = None if "CLIP" in spec else "classification"
    metrics = diffvision.evaluate(spec, digits, tasks=tasks, num_workers=0, device="cpu")
    printed = capsys.readouterr().out
    for row in (row for row in ROWS if row["model"] == spec):
        value = metrics[row["metric"]]
        assert value == pytest.approx(float(row["value"]), abs=0.006)  # two images of 397, on another CPU
        assert f"{value:.4f}" in printed

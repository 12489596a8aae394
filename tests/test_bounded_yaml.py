"""YAML of others: what it may stand for is known before it is built, wherever it is read."""

import pytest
import yaml
from jsonargparse import get_loader

import diffvision
from diffvision.allow import limit_imports
from diffvision.bounded_yaml import load_yaml
from diffvision.export.history import read_history
from diffvision.opening.runs import run_config

MERGES = ["a0: &a0 {x: 1}"] + [f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 40)]


def test_plain_values_with_aliases_and_merge_keys():
    rows = "\n".join(f"row{n}: {{<<: *a, n: {n}, all: [*a, *a]}}" for n in range(1000))
    read = load_yaml(f"a: &a {{x: 1, y: [1, 2]}}\n{rows}")
    assert read["row7"] == {"x": 1, "y": [1, 2], "n": 7, "all": [{"x": 1, "y": [1, 2]}] * 2}
    assert load_yaml("") is None


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(MERGES),
        "\n".join(MERGES).replace("a39: &a39 {", "a39: {"),
        "\n".join(["a0: &a0 [x, x]"] + [f"a{i}: &a{i} {{*a{i - 1} : *a{i - 1}}}" for i in range(1, 40)]),
        f"a: &a [{'[' * 98}*a{']' * 98}]",
        "[" * 1000 + "]" * 1000,
        "? " * 1000,
        "a: [" + "1, " * 100_000 + "]",
    ],
    ids=["merges", "the last without an anchor", "keys", "in itself", "deep", "deep keys", "long"],
)
def test_what_is_too_large_is_refused_before_it_is_built(text):
    with pytest.raises(yaml.YAMLError, match="with fewer"):
        load_yaml(text)


def test_a_number_to_the_base_of_60_that_no_float_can_be():
    text = f"seed_everything: {'1:' * 400}1.5"
    with pytest.raises(ValueError, match="out of range"):
        load_yaml(text)
    with limit_imports([]), pytest.raises(ValueError, match="out of range"):
        get_loader("yaml")(text)


def test_the_configuration_of_a_run_and_of_fit(tmp_path):
    (tmp_path / "config.yaml").write_text("\n".join(MERGES))
    with pytest.raises(ValueError, match=r"config\.yaml cannot be read"):
        run_config(tmp_path)
    assert read_history(tmp_path, tmp_path / "none.ckpt").config == {}
    with pytest.raises(ValueError, match=r"config\.yaml cannot be read"):
        diffvision.fit(str(tmp_path / "config.yaml"))

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from diffvision import doctor


def test_the_installation_is_ready(capsys):
    assert doctor.doctor() == 0
    printed = capsys.readouterr().out
    assert "ready" in printed
    assert "ViT-B/16" in printed


def test_needs_are_those_of_the_project():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    needs = doctor.read_packages()
    core = {name.replace("_", "-") for name, need in needs.items() if need["extra"] is None}
    assert core == {Requirement(text).name.replace("_", "-") for text in project["dependencies"]}
    assert needs["transformers"]["extra"] == "hf"
    assert "pytest" not in needs


@pytest.mark.parametrize(
    ("name", "version", "broken"),
    [("timm", None, True), ("torch", "2.9.1", True), ("lightning", "2.6.3", True), ("transformers", "4.0", False)],
)
def test_unmet_needs_are_reported(name, version, broken):
    packages = doctor.read_packages()
    assert doctor.check_versions(packages) == []
    packages[name]["installed"] = version
    (finding,) = doctor.check_versions(packages)
    assert finding["broken"] == broken
    assert f"pip install '{name}{packages[name]['needed']}'" in finding["text"]


@pytest.mark.parametrize("missing", ["diffvision", "torch"])
def test_a_missing_package_is_reported_and_nothing_else_is_tried(missing, monkeypatch, capsys):
    def absent(name, real):
        if name == missing:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    for function in ("version", "requires", "metadata"):
        real = getattr(importlib.metadata, function)
        monkeypatch.setattr(importlib.metadata, function, lambda name, real=real: absent(name, real))
    monkeypatch.setattr(doctor, "measure_attention", None)
    assert doctor.doctor() == 1
    assert f"{missing} is not installed" in capsys.readouterr().out

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from diffvision import doctor

HEALTHY = {
    "torch": "2.11.0+cu130",
    "torchvision": "0.26",
    "timm": "1.0.31",
    "open-clip-torch": "3.3.0",
    "lightning": "2.6.6",
    "webdataset": "1.0.2",
    "jsonargparse": "4.53",
    "pillow": "13.0",
    "numpy": "2.3.5",
    "scikit-learn": "1.9",
}


def test_the_installation_is_ready(capsys):
    assert doctor.doctor() == 0
    printed = capsys.readouterr().out
    assert "ready" in printed
    assert "ViT-B/16" in printed


def test_every_usual_shape_has_a_backend_and_a_reason():
    rows = doctor.list_backends()
    chosen = {row[0]: row[2] for row in rows if row[1].startswith("cpu")}
    assert chosen["CLIP's text, V1"] == "eager"
    assert chosen["ViT-B/16 at 224, V1"] == "blocked"
    assert chosen["language, 1024 tokens, V1"] == "blocked"
    assert all(row[3] for row in rows)


def broken(findings):
    return [finding.text for finding in findings if finding.broken]


def notes(findings):
    return [finding.text for finding in findings if not finding.broken]


@pytest.mark.parametrize("installed_from", ["clone", "wheel"])
def test_needs_are_those_of_the_project(installed_from, monkeypatch, tmp_path):
    if installed_from == "wheel":
        monkeypatch.setattr(doctor, "PYPROJECT", tmp_path / "pyproject.toml")
    pyproject = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    core = {Requirement(text).name for text in pyproject["dependencies"]}
    needs = doctor.read_requirements()
    assert {canonicalize_name(name) for name, need in needs.items() if need.extra is None} == {
        canonicalize_name(name) for name in core
    }
    assert ">=4.53" in needs["jsonargparse"].versions
    assert needs["transformers"].extra == "hf"
    assert "pytest" not in needs


def test_a_clone_that_was_updated_after_its_installation(monkeypatch, tmp_path):
    """An editable installation keeps the metadata of the day it was made."""
    file = tmp_path / "pyproject.toml"
    file.write_text('[project]\nname = "diffvision"\ndependencies = ["torch>=99"]\n[project.optional-dependencies]\n')
    monkeypatch.setattr(doctor, "PYPROJECT", file)
    assert [(name, need.versions) for name, need in doctor.read_requirements().items()] == [("torch", ">=99")]
    file.write_text('[project]\nname = "another"\n')  # site-packages of somebody's project
    assert "timm" in doctor.read_requirements()


def test_unmet_needs_are_reported():
    needs = doctor.read_requirements()
    healthy = {**doctor.find_versions(needs), **HEALTHY}

    def unmet(**changed):
        return doctor.check_versions(needs, {**healthy, **changed})

    assert unmet() == []
    (text,) = broken(unmet(webdataset="0.2.86"))
    wanted = needs["webdataset"].versions
    assert text == f"webdataset 0.2.86 is not the needed {wanted}: pip install 'webdataset{wanted}'"
    assert any("timm is not installed" in text for text in broken(unmet(timm=None)))
    assert any("torch 2.9.1 is not the needed " in text for text in broken(unmet(torch="2.9.1")))
    assert any("lightning 2.6.3" in text for text in broken(unmet(lightning="2.6.3")))
    assert unmet(transformers=None) == []
    (text,) = notes(unmet(transformers="4.0"))
    assert "of diffvision[hf]" in text


@pytest.mark.parametrize("missing", ["diffvision", "torch"])
def test_a_missing_package_is_reported_and_nothing_else_is_tried(missing, monkeypatch, capsys):
    def absent(name, real):
        if name == missing:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    for function in ("version", "requires", "metadata"):
        real = getattr(importlib.metadata, function)
        monkeypatch.setattr(importlib.metadata, function, lambda name, real=real: absent(name, real))
    monkeypatch.setattr(doctor, "list_devices", None)
    assert doctor.doctor() == 1
    assert f"{missing} is not installed" in capsys.readouterr().out


def test_a_package_that_cannot_be_imported_is_a_finding(monkeypatch, capsys):
    def fails():
        raise OSError("libtorch_cuda.so: cannot open shared object file")

    monkeypatch.setattr(doctor, "list_devices", fails)
    assert doctor.doctor() == 1
    printed = capsys.readouterr().out
    assert "cannot be imported" in printed
    assert "libtorch_cuda.so" in printed

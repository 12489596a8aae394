"""jsonargparse's private names: where one is missing `fit` refuses, and the limit on imports stays everywhere."""

import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from jsonargparse import _common, _optionals
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from diffvision import allow, doctor, jsonargparse_internals
from diffvision.cli import main


@pytest.fixture
def settings(monkeypatch):
    """Put the process's settings back, which is not done where private names are missing."""
    monkeypatch.setattr(_common, "parsing_settings", dict(_common.parsing_settings))
    monkeypatch.setattr(_optionals, "_config_read_mode", _optionals._config_read_mode)


@pytest.fixture
def absent(settings, monkeypatch):
    monkeypatch.delattr(_optionals, "_set_config_read_mode")


def test_the_installed_jsonargparse_has_every_name():
    assert jsonargparse_internals.missing() == []


def test_the_tested_versions_are_those_that_are_required():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (required,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "jsonargparse")
    assert required.specifier == SpecifierSet(jsonargparse_internals.TESTED)
    assert required.specifier.contains(version("jsonargparse"))


def test_other_parameters_are_named(monkeypatch):
    monkeypatch.setattr(_optionals, "_get_config_read_mode", lambda parser: "fr")
    assert jsonargparse_internals.missing() == ["jsonargparse._optionals._get_config_read_mode()"]


@pytest.mark.usefixtures("absent")
def test_where_a_name_is_missing_fit_refuses_and_doctor_reports(capsys):
    assert main(["fit", "--config", "configs/clip/debug.yaml"]) == 1
    error = capsys.readouterr().err
    assert "lacks what limits the imports of a configuration: install jsonargparse>=" in error
    assert "jsonargparse._optionals._set_config_read_mode" in error
    (finding,) = doctor.check_private_names()
    assert "jsonargparse lacks" in finding.text


@pytest.mark.usefixtures("absent")
def test_where_a_name_is_missing_other_commands_work_within_the_limit(capsys):
    assert main(["models", "--filter", "CLIP-debug"]) == 0
    parser = allow.Parser()
    parser.add_argument("--name", type=Callable)
    with pytest.raises(ValueError, match=r"class_path 'os.system' .*was not"), allow.limit_imports([]):
        parser.parse_args(["--name=os.system"])
    with pytest.raises(ValueError, match="lacks what limits the imports"), allow.limit_imports(["--allow", "mine"]):
        pass


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("lost", [TypeError("unexpected keyword argument 'import_path_denylist'"), None])
def test_where_the_limit_cannot_be_set_every_command_refuses(lost, monkeypatch, capsys):
    """The settings are refused, or taken without effect."""

    def set_parsing_settings(**settings):
        if lost is not None:
            raise lost

    monkeypatch.setattr(allow, "set_parsing_settings", set_parsing_settings)
    _common.parsing_settings["import_path_verdicts"] = {}
    assert main(["models", "--filter", "CLIP-debug"]) == 1
    assert "does not limit what a configuration may import: install jsonargparse>=4.53,<5" in capsys.readouterr().err

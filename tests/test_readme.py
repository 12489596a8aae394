"""What README and the documentation show runs: Python blocks are executed, commands looked up, links followed."""

import importlib.util
import inspect
import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffvision import data, training
from diffvision.cli import GROUPS, TRAINER_COMMANDS, command_names
from diffvision.evaluation import suite
from diffvision.evaluation.language.tasks import LANGUAGE_EVALUATIONS
from diffvision.training.recipes import find_recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONFIGURED = {"model": ("ContrastiveModule", "ClassificationModule", "LanguageModule")}
CONFIGURED |= {"data": ("ImageTextData", "ImageLabelData", "TextData")}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def executed(code: str, folder: Path) -> None:
    (folder / "blocks.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", "blocks.py"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def photos(tmp_path):
    """Ten pictures of each of ten classes, below `photos/train` and `photos/val`."""
    rng = np.random.default_rng(0)
    for number in range(100):
        folder = tmp_path / "photos" / ("val" if number % 10 < 2 else "train") / f"class{number // 10}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return tmp_path


@pytest.mark.slow
def test_python_of_the_readme(photos):
    executed("\n".join(blocks(ROOT / "README.md", "python")).replace("max_epochs=5", "max_epochs=1"), photos)


@pytest.mark.slow
def test_python_of_start(tmp_path):
    pages = [ROOT / "docs/start/install.md", ROOT / "docs/start/pictures.md"]
    executed("\n".join(block for page in pages for block in blocks(page, "python")), tmp_path)
    assert len(list((tmp_path / "photos").rglob("*.png"))) == 1797
    assert (tmp_path / "photos" / "captions.csv").stat().st_size > 10_000


# ---- commands ------------------------------------------------------------------------------------------------------


def commands(page: Path) -> list[list[str]]:
    """Return the commands of `diffvision` in a page's bash blocks, each as the words behind the program's name."""
    found = []
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if "# at commit" in line:
                continue  # of an earlier version
            for part in re.split(r"&&|\|\||;|\s>\s|\s\|\s", line):
                words = shlex.split(part.strip().removeprefix("$ "), comments=True)
                named = [index for index, word in enumerate(words) if word == "diffvision"]
                starts = [index for index in named if words[index - 1] != "--model"]
                if starts and (starts[0] == 0 or words[0] in ("torchrun", "srun", "python", "nice")):
                    found.append(words[starts[0] + 1 :])
    return [words for words in found if words and words[0] != "run" and "..." not in words]


@pytest.fixture(scope="module")
def parsers():
    """The parser of each command but the trainer's, made once."""
    spec = importlib.util.spec_from_file_location("commands", ROOT / "scripts" / "documentation" / "commands.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: module.command_parser(name) for name in command_names()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page(page, parsers):
    for words in commands(page):
        _check_command(words, parsers, page.name)


def _check_command(words: list[str], parsers, page: str) -> None:
    """Check that a command is there and has the options."""
    if words[0] in TRAINER_COMMANDS:
        _check_trainer_options(words[1:])
    elif words[0].startswith("-"):
        assert words in (["--help"], ["--version"])
    else:
        name = " ".join(words[: 3 if words[:2] == ["data", "make"] else 2 if words[0] in GROUPS else 1])
        assert name in parsers, f"{page}: no command {name!r}"
        known = {text for action in parsers[name]._actions for text in action.option_strings}
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert options <= known | {"--allow", "--help", "--json"}, f"{page}: {shlex.join(words)}"


def test_the_claims_commands_and_tests_are_there(parsers):
    page = (ROOT / "docs/results/claims.md").read_text()
    rows = [
        line.split("|")[2:4]
        for line in page.partition("## Commands and tests")[2].splitlines()
        if "`" in line and line[0] == "|"
    ]
    assert len(rows) > 25
    for commands_of_row, tests in rows:
        for words in map(shlex.split, re.findall(r"`([^`]+)`", commands_of_row)):
            if words[0] == "diffvision":
                _check_command(words[1:], parsers, "claims.md")
                tasks = next((word.split(",") for option, word in itertools.pairwise(words) if option == "--tasks"), [])
                known = LANGUAGE_EVALUATIONS if words[1] == "evaluate-language" else {*suite.EVALUATIONS, *suite.GROUPS}
                assert set(tasks) <= set(known), words
            else:
                assert (ROOT / words[words[0] == "python"]).is_file(), words
        for path, _, name in (test.partition("::") for test in re.findall(r"`([^`]+\.py[^`]*)`", tests)):
            assert f"def {name}" in (ROOT / "tests" / path).read_text(), f"{path}::{name}"


def _check_trainer_options(words: list[str]) -> None:
    """Check that recipes are there, and that each option names an argument of one of our modules or data modules."""
    for index, word in enumerate(words):
        if word == "--config" and words[index + 1].startswith(("configs/", "clip/", "vision/", "language/")):
            name = words[index + 1].replace("$1", "diffclip")
            assert (ROOT / name).is_file() or find_recipe(name).is_file(), name
        setting, *more = word.partition("=")[0].removeprefix("--").removesuffix("+").split(".")
        if word.startswith("--") and setting in CONFIGURED and more:
            argument = more[1] if more[0] == "init_args" else more[0]
            package = training if setting == "model" else data
            classes = [getattr(package, name) for name in CONFIGURED[setting]]
            bases = {base for made in classes for base in made.__mro__ if base is not object}
            assert any(argument in inspect.signature(base).parameters for base in bases), word

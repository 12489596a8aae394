"""What import-linter does not see: drawers without a name, and files that are too long."""

import runpy
from pathlib import Path

import pytest

import diffvision

PACKAGE = Path(diffvision.__file__).parent
NAMELESS = {"utils", "util", "common", "helpers", "helper", "core", "base", "misc"}


def test_no_module_is_called_utils_or_helpers():
    assert not [path for path in PACKAGE.rglob("*") if path.stem in NAMELESS]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_says_what_it_is_for_and_stays_small(path):
    source = path.read_text()
    if path.name != "__init__.py" or source.strip():
        assert source.startswith('"""')
    assert source.count("\n") <= 500


def test_every_dependency_has_a_lower_bound():
    """Which `.ci/floors` installs."""
    script = runpy.run_path(str(Path(__file__).parents[1] / "scripts/floors.py"))
    assert script["read_floors"]()["torch"] == "2.10"

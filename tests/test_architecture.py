"""What import-linter does not see: drawers without a name, and files that are too long."""

import runpy
from pathlib import Path

import diffvision

PACKAGE = Path(diffvision.__file__).parent
NAMELESS = {"utils", "util", "common", "helpers", "helper", "core", "base", "misc"}


def test_no_module_is_called_utils_or_helpers():
    assert not [path for path in PACKAGE.rglob("*") if path.stem in NAMELESS]


def test_every_file_says_what_it_is_for_and_stays_small():
    sources = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    empty = [path for path, source in sources.items() if path.name == "__init__.py" and not source.strip()]
    assert not [path for path, source in sources.items() if not source.startswith('"""') and path not in empty]
    assert not [path for path, source in sources.items() if source.count("\n") > 500]


def test_every_dependency_has_a_lower_bound():
    """Which `.ci/floors` installs."""
    script = runpy.run_path(str(Path(__file__).parents[1] / "scripts/floors.py"))
    assert script["read_floors"]()["torch"] == "2.10"

"""Print the oldest versions that pyproject.toml allows, as a constraints file for pip.

    python scripts/floors.py > floors.txt
    pip install -e ".[dev]" -c floors.txt

The packages of `dev` without a lower bound are tools, of which any version will do.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def read_floors(pyproject: Path = ROOT / "pyproject.toml") -> dict[str, str]:
    """Return each package's lowest allowed version, from the dependencies and the extra `dev`.

    Raises:
        ValueError: a dependency has no lower bound, or a package has two.
    """
    project = tomllib.loads(pyproject.read_text())["project"]
    floors: dict[str, str] = {}
    for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        requirement = Requirement(text)
        bounds = [bound.version for bound in requirement.specifier if bound.operator == ">="]
        if not bounds and text in project["dependencies"]:
            raise ValueError(f"{requirement.name} must have a lower bound in pyproject.toml, got {text!r}")
        for bound in bounds:
            if floors.setdefault(requirement.name, bound) != bound:
                raise ValueError(
                    f"{requirement.name} must have one lower bound, got {floors[requirement.name]} and {bound}"
                )
    return floors


if __name__ == "__main__":
    print("\n".join(f"{name}=={version}" for name, version in read_floors().items()))

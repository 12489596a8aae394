"""Plugins: attention variants, datasets, evaluation tasks and more that other packages add by entry points.

A package names what it adds in its pyproject.toml, and `docs/guides/plugins.md` has an example of each group:

    [project.entry-points."diffvision.attention"]
    mine = "my_package.attention:MyAttention"

`diffvision.lab` adds its entries in the same form, in lab/entry_points.txt, so that they need no installation. A
module is imported when its entry is first used.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from configparser import ConfigParser
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

LAB = Path(__file__).parent / "lab" / "entry_points.txt"

Row = TypeVar("Row")


@cache
def entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    """Return the entry points of a group by name: those of the lab first, then those of installed packages.

    Raises:
        ValueError: two packages add the same name.
    """
    parser = ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]  # keeps upper case
    parser.read(LAB, encoding="utf-8")
    lab = parser[group] if parser.has_section(group) else {}
    found = {name: metadata.EntryPoint(name, value, group) for name, value in lab.items()}
    for entry in metadata.entry_points(group=group):
        if entry.name in found:
            packages = " and ".join(map(_package, (found[entry.name], entry)))
            raise ValueError(f"{packages} both add {entry.name!r} to {group}: uninstall one of them")
        found[entry.name] = entry
    return found


def load(group: str, name: str) -> Any:
    """Import what an entry point of `entry_points(group)` names.

    Raises:
        ValueError: there is none of that name, or it cannot be imported.
    """
    if name not in entry_points(group):
        raise ValueError(f"no package adds {name!r} to {group}: install one that does")
    entry = entry_points(group)[name]
    try:
        return entry.load()
    except Exception as error:
        raise ValueError(
            f"{name!r} of {group} cannot be imported: repair or uninstall {_package(entry)} "
            f"({entry.value}: {type(error).__name__}: {error})"
        ) from error


def _package(entry: metadata.EntryPoint) -> str:
    return "diffvision.lab" if entry.dist is None else entry.dist.name


class PluginTable(MutableMapping[str, Row], Generic[Row]):
    """The library's rows of a table, followed by those of plugins, which are imported when they are looked up.

    Args:
        group: the group of entry points with further rows.
        rows: the library's rows, which no plugin replaces.
        kind: the class that a plugin's row must be an instance or a subclass of.
    """

    def __init__(self, group: str, rows: Mapping[str, Row], kind: type) -> None:
        self.group, self.kind = group, kind
        self._rows, self._library = dict(rows), frozenset(rows)

    def __getitem__(self, name: str) -> Row:
        if name not in self._rows:
            value = self._added()[name].value
            row: Any = load(self.group, name)
            fits = issubclass(row, self.kind) if isinstance(row, type) else isinstance(row, self.kind)
            if not fits:
                raise ValueError(f"{name!r} of {self.group} must be of class {self.kind.__name__}: correct {value}")
            self._rows[name] = row
        return self._rows[name]

    def __setitem__(self, name: str, row: Row) -> None:
        self._rows[name] = row

    def __delitem__(self, name: str) -> None:
        del self._rows[name]

    def __contains__(self, name: object) -> bool:
        return name in self._rows or name in self._added()

    def __iter__(self) -> Iterator[str]:
        return iter([*self._rows, *(name for name in self._added() if name not in self._rows)])

    def __len__(self) -> int:
        return len(self._rows.keys() | self._added().keys())

    def _added(self) -> dict[str, metadata.EntryPoint]:
        entries = entry_points(self.group)
        if taken := self._library & entries.keys():
            name = min(taken)
            raise ValueError(
                f"{_package(entries[name])} adds {name!r} to {self.group}, a name of diffvision: rename it"
            )
        return entries

"""Plugins: attention variants, datasets and evaluations that other packages add by entry points of one group.

A package names what it adds in its pyproject.toml, each entry as TABLE.NAME (`docs/guides/plugins.md`):

    [project.entry-points.diffvision]
    "attention.mine" = "my_package.attention:MyAttention"

A module is imported when its entry is first used.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache
from importlib import metadata
from typing import Any, Generic, TypeVar

GROUP = "diffvision"

Row = TypeVar("Row")


@cache
def entry_points(table: str) -> dict[str, metadata.EntryPoint]:
    """Return the entry points of a table (attention, datasets, tasks or language_tasks) by name.

    Raises:
        ValueError: two packages add the same name.
    """
    found: dict[str, metadata.EntryPoint] = {}
    for entry in metadata.entry_points(group=GROUP):
        own, _, name = entry.name.partition(".")
        if own != table:
            continue
        if name in found:
            packages = " and ".join(map(_package, (found[name], entry)))
            raise ValueError(f"{packages} both add {name!r} to {table}: uninstall one of them")
        found[name] = entry
    return found


def _package(entry: metadata.EntryPoint) -> str:
    return "a package" if entry.dist is None else entry.dist.name


class PluginTable(MutableMapping[str, Row], Generic[Row]):
    """The library's rows of a table, followed by those of plugins, which are imported when they are looked up.

    Args:
        name: of the table, before the point in the entries' names.
        rows: the library's rows, which no plugin replaces.
        kind: the class that a plugin's row must be an instance or a subclass of.
    """

    def __init__(self, name: str, rows: Mapping[str, Row], kind: type) -> None:
        self.name, self.kind = name, kind
        self._rows, self._library = dict(rows), frozenset(rows)

    def __getitem__(self, name: str) -> Row:
        if name not in self._rows:
            entry = self._added()[name]
            try:
                row: Any = entry.load()
            except Exception as error:
                raise ValueError(
                    f"{name!r} of {self.name} cannot be imported: repair or uninstall {_package(entry)} "
                    f"({entry.value}: {type(error).__name__}: {error})"
                ) from error
            fits = issubclass(row, self.kind) if isinstance(row, type) else isinstance(row, self.kind)
            if not fits:
                raise ValueError(
                    f"{name!r} of {self.name} must be of class {self.kind.__name__}: correct {entry.value}"
                )
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
        entries = entry_points(self.name)
        if taken := self._library & entries.keys():
            name = min(taken)
            raise ValueError(f"{_package(entries[name])} adds {name!r} to {self.name}, a name of diffvision: rename it")
        return entries

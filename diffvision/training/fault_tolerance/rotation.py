"""When checkpoints that were replaced or removed are really deleted: after the next step that was finite.

One step that is too large leaves weights that are finite and useless: all steps after it are skipped, while
checkpoints of these weights replace the good ones. The files themselves are written in `checkpoints`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import count
from pathlib import Path

from diffvision.training.fault_tolerance.records import TEMPORARY, record_path


class Rotation:
    """Keeps the checkpoints that ModelCheckpoint removes and that a save replaces until the next step.

    Such a checkpoint gets a temporary name first. A finite step, whose gradient was computed at the newer weights,
    deletes it. A skipped step renames it back, and no checkpoint saved before is deleted while steps are skipped.

    Args:
        skipping: whether the last step was skipped.

    Attributes:
        kept: checkpoints that are on the disk only because steps are skipped.
    """

    def __init__(self, *, skipping: bool = False) -> None:
        self.skipping = skipping
        self.kept: list[Path] = []
        self._aside: list[tuple[Path, Path]] = []  # the temporary name and the former one
        self._saved: set[Path] = set()  # while steps were skipped

    # --- what the StepGuard reports ---

    def step_finite(self) -> None:
        """Delete what the last checkpoints replaced: a finite step has shown that the newer weights are usable."""
        for path in [temporary for temporary, _ in self._aside] + self.kept:
            path.unlink(missing_ok=True)
            record_path(path).unlink(missing_ok=True)
        self.skipping, self.kept, self._aside = False, [], []
        self._saved.clear()

    def step_skipped(self) -> None:
        """Keep what the last checkpoints replaced: the newer weights may be useless."""
        self.skipping = True
        for temporary, path in self._aside:
            self.kept.append(_move(temporary, _free_name(path)))
        self._aside = []

    # --- what DurableCheckpointIO does ---

    def saved(self, path: Path) -> None:
        if self.skipping:
            self._saved.add(path)
            self.kept = [other for other in self.kept if other != path]

    def before_replacing(self, path: Path) -> None:
        """Keep a second name of a file that is overwritten; a filesystem without hard links cannot keep it."""
        if path in self._saved:
            return
        temporary = self._temporary(path)
        with suppress(OSError):
            if record_path(path).exists():
                os.link(record_path(path), record_path(temporary))
            os.link(path, temporary)
            self._put_aside(temporary, path)

    def removing(self, path: Path) -> bool:
        """Return whether a checkpoint that Lightning removes stays until the next step."""
        if path in self._saved or not path.is_file():
            return False
        if self.skipping:
            self.kept.append(path)
        else:
            self._put_aside(_move(path, self._temporary(path)), path)
        return True

    def _put_aside(self, temporary: Path, path: Path) -> None:
        self._aside.append((temporary, path))
        if self.skipping:
            self.step_skipped()

    def _temporary(self, path: Path) -> Path:
        """Return a name that the next start of a killed run removes."""
        return path.with_name(TEMPORARY.format(f"{os.getpid()}-aside{len(self._aside)}"))


def _move(path: Path, target: Path) -> Path:
    """Rename a checkpoint and its record; return the new name."""
    path.rename(target)
    with suppress(FileNotFoundError):
        record_path(path).rename(record_path(target))
    return target


def _free_name(path: Path) -> Path:
    """Return a path, or where another file has its name, one that says that it is older than the skipped steps."""
    names = (path.with_stem(f"{path.stem}-before-skipped" + (f"-v{n}" if n else "")) for n in count())
    return path if not path.exists() else next(name for name in names if not name.exists())

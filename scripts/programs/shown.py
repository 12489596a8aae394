"""Runs other programs as a user would: shows each command and the end of what it printed, and a table of what held."""

import os
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Last lines of an output.
SHOWN = 6


class Shown:
    """What was run and what held.

    Args:
        folder: where the commands run, and their whole output is kept (`NAME.log`); made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[tuple[str, bool, str]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, command: list[str], lines: int = SHOWN, only: str = "") -> str:
        """Run a command and return all that it printed; one that fails is a row of the table and ends the script.

        Args:
            name: of its log.
            command: with its arguments.
            lines: how many to show of its last ones.
            only: of those that have this text in them.
        """
        print(f"\n$ {shlex.join(_short(command))}", flush=True)
        begun = time.monotonic()
        quiet = {"PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, **quiet},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        (self.folder / f"{name}.log").write_text(done.stdout)
        kept = [line for line in done.stdout.splitlines() if done.returncode or only in line]
        print("\n".join(kept[-(lines if not done.returncode else 40) :]))
        print(f"({time.monotonic() - begun:.0f} s)", flush=True)
        if done.returncode:
            self.check(f"{name} ends well", False, f"exit status {done.returncode}")
            sys.exit(self.end())
        return done.stdout

    def check(self, what: str, held: bool, detail: str) -> None:
        """Add a row to the table."""
        self.rows.append((what, held, detail))

    def end(self) -> int:
        """Print the table; return 1 if anything did not hold, else 0."""
        print("\n| what | | |\n|---|---|---|")
        for what, held, detail in self.rows:
            print(f"| {what} | {'pass' if held else 'FAIL'} | {detail} |")
        return int(not all(held for _, held, _ in self.rows))


def versions(*packages: str) -> str:
    """Return `torch 2.15.0, timm 1.0.31, ...` of packages, "(none)" where one is not installed."""
    installed = []
    for package in packages:
        try:
            installed.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            installed.append(f"{package} (none)")
    return ", ".join(installed)


def _short(command: list[str]) -> list[str]:
    """Return the command as a user would type it: the interpreter and scripts without the folders they are in."""
    return [Path(part).name if Path(part).is_absolute() and Path(part).is_file() else part for part in command]

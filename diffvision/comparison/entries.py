"""The models of a comparison: which file each argument stands for, and which of them are seeds of one model.

A run's directory stands for the checkpoint that `opening.run_folders` chooses.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffvision.models.architecture import flatten
from diffvision.opening import best_checkpoint, find_run, split_label
from diffvision.opening.run_folders import run_config, run_of, setting
from diffvision.opening.specs import is_name

# Settings that do not change which model a run trains.
_INCIDENTAL = ("seed_everything", "data.init_args.seed", "ckpt_path", "weights_only", "resume", "resume_ranks")
_INCIDENTAL_TRAINER = ("logger", "default_root_dir", "enable_progress_bar", "log_every_n_steps")


@dataclass(frozen=True)
class Entry:
    """One argument of a comparison.

    Attributes:
        spec: as it was given, without a label.
        model: for `open_model`.
        which: what the model is, in words: "best zero_shot/digits/acc1 0.9521", "last, step 786", "as given".
        given_label: before the =; None where there was none.
        run: the directory of the training run; None where the model is not a file of one.
        config: of the run; empty without one.
    """

    spec: str
    model: str
    which: str
    given_label: str | None = None
    run: Path | None = None
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> Any:
        """The seeds of the run: of everything, and of its data."""
        return setting(self.config, "seed_everything"), setting(self.config, "data.init_args.seed")

    @property
    def label(self) -> str:
        """The label as given, or the model's name in the run, or the last part of the path."""
        if self.given_label is not None:
            return self.given_label
        trained = setting(self.config, "model.init_args.model")
        return split_label(trained if isinstance(trained, str) else self.spec)[0]


@dataclass
class Group:
    """One model of a comparison, with one entry for each of its seeds."""

    label: str
    entries: list[Entry]


def read_entries(models: Sequence[str]) -> list[Entry]:
    """Return what each argument stands for.

    Raises:
        ValueError: fewer than two; one given twice; the directory of several runs, or without checkpoints.
    """
    if len(models) < 2:
        raise ValueError(f"{len(models) or 'no'} model{'' if models else 's'} to compare: give two or more")
    entries = [_read(spec) for spec in models]
    opened = [entry.model if is_name(entry.model) else os.path.realpath(entry.model) for entry in entries]
    for number, entry in enumerate(entries):
        if opened[number] in opened[:number]:
            raise ValueError(f"{entry.spec} is given twice: a comparison takes each model once")
    return entries


def group_seeds(entries: Sequence[Entry]) -> list[Group]:
    """Return the models in order; runs whose configurations differ in their seeds alone are one.

    Raises:
        ValueError: two models have the same given label, and are not seeds of one.
    """
    groups: list[Group] = []
    for entry in entries:
        same = next((group for group in groups if group.entries[0].given_label == entry.given_label
                     and _is_seed(entry, group.entries)), None)  # fmt: skip
        if same is not None:
            same.entries.append(entry)
            continue
        twin = next((group for group in groups if entry.given_label in (group.label,)), None)
        if twin is not None:
            raise ValueError(f"two models have the label {twin.label!r}, and are not seeds of one run")
        groups.append(Group(entry.label, [entry]))
    _make_unique(groups)
    return groups


# ---- runs ----------------------------------------------------------------------------------------------------------


def _read(given: str) -> Entry:
    """Return the entry for a model, or for the best checkpoint of a run."""
    label, spec = split_label(given)
    given_label = label if spec != given else None
    if is_name(spec):
        return Entry(spec, spec, "as given", given_label, None, {})
    path = Path(spec)
    run = find_run(path)
    if run is None:
        given_run = run_of(path)
        return Entry(spec, spec, "as given", given_label, given_run, run_config(given_run))
    checkpoint, which = best_checkpoint(run)
    return Entry(spec, str(checkpoint), which, given_label, run, run_config(run))


# ---- seeds ---------------------------------------------------------------------------------------------------------


def _is_seed(entry: Entry, others: Sequence[Entry]) -> bool:
    """Return whether a run differs from others in its seeds, and in nothing else."""
    if not entry.config or entry.seed in [other.seed for other in others]:
        return False
    return model_settings(entry.config) == model_settings(others[0].config)


def model_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that decide which model is trained and how, by their full names."""
    incidental = (*_INCIDENTAL, *(f"trainer.{name}" for name in _INCIDENTAL_TRAINER))
    flat = {".".join(name): value for name, value in flatten(config, lists=True)}
    return {
        name: value
        for name, value in flat.items()
        if not name.startswith(incidental) and not name.endswith(".dirpath")  # of checkpoints
    }


def _make_unique(groups: list[Group]) -> None:
    """Add to labels that occur twice the run's directory, or else the whole argument."""
    for longer in (lambda e: e.run.name if e.run is not None else e.spec, lambda e: e.spec):
        labels = [group.label for group in groups]
        for group in groups:
            if labels.count(group.label) > 1 and group.entries[0].given_label is None:
                entry = group.entries[0]
                group.label = f"{entry.label} {longer(entry)}"

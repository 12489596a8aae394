"""The measured choices of attention backends that a run keeps: the same on every rank, and when it is resumed."""

from __future__ import annotations

import json
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from diffvision.nn.attention import AttentionLayer
from diffvision.ops.attention import tuned


def describe_tuning(trainer: pl.Trainer) -> str:
    """Return the choices that a run uses, and what they were measured on, as text for its checkpoints."""
    device = trainer.strategy.root_device.type
    if device not in tuned.DEVICES:
        return ""
    tuning = tuned.tuning_of(device)
    return json.dumps({"machine": tuned.machine_of(device), "tuning": None if tuning is None else tuning.to_json()})


def agree_on_tuning(trainer: pl.Trainer, module: pl.LightningModule, run: dict[str, Any] | None) -> None:
    """Let every rank use the choices of the run that is resumed, or of rank 0.

    Args:
        trainer: of the run, after its processes have met.
        module: what is trained.
        run: what the checkpoint says of the run; None for a new one.
    """
    device = trainer.strategy.root_device.type
    if device not in tuned.DEVICES:
        return
    tuning = tuned.tuning_of(device)
    if run is not None:
        tuning = _tuning_of_run(run, tuning, device, str(trainer.ckpt_path))
    elif device == "cuda" and _is_unmeasured(tuning, module):
        rank_zero_info(
            f"backends of attention were not measured on {tuned.device_name(device)}: `diffvision tune` finds the "
            "fastest in minutes, for this machine's runs from then on"
        )
    plain = trainer.strategy.broadcast(None if tuning is None else tuning.to_json())
    tuned.use(device, None if plain is None else tuned.Tuning.from_json(plain))


def _is_unmeasured(tuning: tuned.Tuning | None, module: pl.LightningModule) -> bool:
    """Return whether a module has attention of ours, and its backends could be measured."""
    if (tuning is not None and tuning.choices) or tuned.tuning_file() is None:
        return False
    return any(isinstance(part, AttentionLayer) for part in module.modules())


def _tuning_of_run(run: dict[str, Any], current: tuned.Tuning | None, device: str, origin: str) -> tuned.Tuning | None:
    """Return the choices of the run that wrote a checkpoint; on another machine the current ones."""
    if run.get("tuning") == "":  # it was of a device with one backend
        return current
    if "tuning" not in run:
        return None if "place" in run else current  # a version before there were choices, or another program
    try:
        saved = json.loads(run["tuning"])
        machine, plain = saved["machine"], saved["tuning"]
        before = None if plain is None else tuned.Tuning.from_json(plain)
    except (ValueError, KeyError, TypeError, RecursionError):
        rank_zero_warn(f"resumed from {origin}: its choices of attention backends cannot be read; those of now count")
        return current
    here = tuned.machine_of(device)
    if machine == here or before == current:
        return before
    rank_zero_warn(
        f"resumed from {origin}: its choices of attention backends were for {_describe_machine(machine)}, not for "
        f"{_describe_machine(here)}: those of now count, so its numbers are not bit-equal"
    )
    return current


def _describe_machine(machine: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in machine.items())

"""The optimizer, AdamW or another one of timm's, its settings and its parameter groups.

The learning rate's schedule is in `schedule`; clipping and skipped steps are in `fault_tolerance`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from diffvision.errors import did_you_mean
from diffvision.training.sharding import find_blocks

FUSED = ("cpu", "cuda")
"""Devices for which AdamW is one fused kernel."""
ADAMW: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-6}
"""AdamW's settings where neither the user nor the module has others."""
_FUSED_PROJECTION = re.compile(r"(^|\.)(qkv\.weight|in_proj_weight)$")  # timm's, and OpenCLIP's
_FIRST_LAYER = re.compile(r"emb|token|patch|stem|ln_pre|norm_pre|(conv|bn)\d")  # names of what comes before the blocks
Decay = Literal["cosine", "linear"]


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Settings of the optimizer and of its schedule: linear warm-up, then decay, both per step.

    Attributes:
        name: "adamw", or another optimizer of `timm.optim.list_optimizers()`, such as "lion". Those with "muon" in
            their names update the matrices of blocks by Muon, and everything else by AdamW.
        args: further arguments of the optimizer.
        lr: the highest learning rate, reached at the end of the warm-up.
        weight_decay: for matrices only: see `param_groups`.
        betas: the optimizer's; null for its default. That of "adamw" is the module's: (0.9, 0.98) for CLIP,
            (0.9, 0.999) for classification, (0.9, 0.95) for language.
        eps: the optimizer's; null for its default. That of "adamw" is the module's: 1e-6 for CLIP, else 1e-8.
        warmup_epochs: length of the warm-up; may be fractional. If it is not shorter than the run, a tenth of the
            run is used.
        warmup_steps: the same in optimizer steps; overrides warmup_epochs.
        default_warmup_steps: the warm-up if neither of the two is set; None: one epoch. If it is more than half of the
            run, a tenth of the run is used.
        start_lr: learning rate at which the warm-up starts.
        end_lr: learning rate at which the decay ends.
        decay: "cosine", or "linear" as the DIFF Transformer's.
        clip_norm: the gradient's norm is clipped to this; None: no clipping.
        max_skipped: limit on consecutive steps skipped because their loss or gradient is not finite; one more stops the
            run.
    """

    name: str = "adamw"
    args: dict[str, Any] = field(default_factory=dict)
    lr: float = 5e-4
    weight_decay: float = 0.2
    betas: tuple[float, ...] | None = None
    eps: float | None = None
    warmup_epochs: float | None = None
    warmup_steps: int | None = None
    default_warmup_steps: int | None = None
    start_lr: float = 0.0
    end_lr: float = 0.0
    decay: Decay = "cosine"
    clip_norm: float | None = None
    max_skipped: int = 10

    def __post_init__(self) -> None:
        if self.betas is not None:
            object.__setattr__(self, "betas", tuple(self.betas))  # a configuration or a checkpoint has a list
        for name in ("weight_decay", "max_skipped", "warmup_steps", "warmup_epochs", "default_warmup_steps"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"optimizer.{name} must be 0 or more, got {value}")
        if self.lr <= 0:
            raise ValueError(f"optimizer.lr must be above 0, got {self.lr}")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"optimizer.clip_norm must be above 0, or null for no clipping, got {self.clip_norm}")
        if self.name == "adamw" and self.betas and not (len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas)):
            raise ValueError(f"optimizer.betas must be two numbers from 0 to below 1 for adamw, got {self.betas}")
        if self.decay not in get_args(Decay):
            raise ValueError(f"optimizer.decay must be one of {', '.join(get_args(Decay))}, got {self.decay!r}")
        if self.name != "adamw" or self.args:
            self._check_optimizer()

    @property
    def is_muon(self) -> bool:
        """Whether matrices of blocks are updated by Muon."""
        return self.name.endswith("muon")

    def _check_optimizer(self) -> None:
        """Raise ValueError for an unknown optimizer, or for arguments that it does not take."""
        from timm.optim import get_optimizer_info, list_optimizers

        if self.name not in (every := cast(list[str], list_optimizers())):
            near = did_you_mean(self.name, every)
            raise ValueError(f"optimizer.name must be one of timm.optim.list_optimizers(), got {self.name!r}{near}")
        info = get_optimizer_info(self.name)
        if info.second_order:
            raise ValueError(f"optimizer.name must be an optimizer of first order, got {self.name!r}")
        for name in ADAMW:
            if getattr(self, name) is not None and not getattr(info, f"has_{name}"):  # timm leaves it out in silence
                raise ValueError(f"optimizer.{name} must be null, as {self.name} takes none, got {getattr(self, name)}")
        try:
            create_optimizer([{"params": [nn.Parameter(torch.ones(4))]}], self)
        except Exception as error:
            text = " ".join(str(error).split())
            raise ValueError(f"optimizer.args must be arguments of {self.name}, got {self.args}: {text}") from error


def is_undecayed(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is excluded from weight decay.

    That is anything 1-D or scalar (norms, biases, logit scale, V1's lambda vectors), V2's lambda projection and CoDA's
    angles. Embeddings decay, as in OpenCLIP and SLIP.
    """
    return parameter.ndim < 2 or "lambda" in name or name.endswith(("bias", "theta"))


def param_groups(
    model: nn.Module,
    settings: OptimizerSettings,
    undecayed: Collection[str] = (),
    scales: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Return the trainable parameters in groups by weight decay and learning-rate multiplier.

    Args:
        model: the model.
        settings: its weight decay is for parameters that are not excluded from it (`is_undecayed`). With Muon, all but
            the matrices of blocks are marked for timm's fallback to AdamW.
        undecayed: names of further parameters without decay.
        scales: learning-rate multiplier of each parameter, by name; see `layer_scales`.
    """
    in_blocks = {id(p) for block in find_blocks(model) for p in block.parameters()} if settings.is_muon else set()
    groups: dict[tuple[bool, float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = not (name in undecayed or is_undecayed(name, parameter))
        scale = (scales or {}).get(name, 1.0)
        falls_back = settings.is_muon and not (decays and id(parameter) in in_blocks)
        group: dict[str, Any] = {"params": [], "weight_decay": settings.weight_decay if decays else 0.0}
        group |= {"lr_scale": scale} if scales is not None else {}
        group |= {"use_fallback": True} if falls_back else {}
        groups.setdefault((decays, scale, falls_back), group)["params"].append(parameter)
    if not groups:
        raise ValueError("no parameter is trainable, as every tower is locked: unlock one")
    if settings.is_muon:
        _check_muon(model, groups.values())
    # The order is part of checkpoints.
    return [groups[key] for key in (sorted(groups) if scales is None else groups)]


def _check_muon(model: nn.Module, groups: Collection[dict[str, Any]]) -> None:
    """Refuse Muon without a matrix to update; warn of fused projections, which it takes as one matrix."""
    if all("use_fallback" in group for group in groups):
        raise ValueError("no matrix of a block is trained, which Muon would update: set optimizer.name to adamw")
    if fused := [name for name, _ in model.named_parameters() if _FUSED_PROJECTION.search(name)]:
        rank_zero_warn(
            f"Muon takes queries, keys and values of {fused[0]} as one matrix, those of differential layers singly: "
            "such models do not compare with differential ones"
        )


def layer_scales(model: nn.Module, decay: float, names: Collection[str]) -> dict[str, float]:
    """Return each parameter's learning-rate multiplier, by name: `decay` to the power of the layers above it.

    Parameters after the blocks, such as the head, have 1.

    Args:
        model: the model.
        decay: ratio of a layer's learning rate to that of the next one.
        names: the tower's parameters. The embeddings are one layer, each block another.
    """
    number = {id(p): index for index, block in enumerate(find_blocks(model)) for p in block.parameters()}
    tower = {name: number.get(id(p)) for name, p in model.named_parameters() if name in names}
    blocks = sorted({index for index in tower.values() if index is not None})
    layers = {
        name: (0 if _FIRST_LAYER.search(name) else len(blocks) + 1) if index is None else blocks.index(index) + 1
        for name, index in tower.items()
    }
    return {name: decay ** (len(blocks) + 1 - layer) for name, layer in layers.items()}


def check_layer_decay(**decays: float | None) -> None:
    """Raise ValueError for a layer decay that is not in (0, 1]."""
    for name, decay in decays.items():
        if decay is not None and not 0 < decay <= 1:
            raise ValueError(f"{name} must be above 0 and at most 1, or null for one learning rate, got {decay}")


def create_optimizer(
    groups: list[dict[str, Any]], settings: OptimizerSettings, trainer: pl.Trainer | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of `groups`; a group's `lr_scale` (layer decay) multiplies its learning rate.

    AdamW is torch's fused kernel: faster, and it skips a step that is not finite without synchronising. It is not used
    with a gradient scaler (16-mixed) or Trainer's gradient_clip_val, because it would unscale the gradients only after
    their norm was clipped and logged.
    """
    from timm.optim import create_optimizer_v2  # takes seconds

    for group in groups:
        group["lr"] = settings.lr * group.get("lr_scale", 1.0)
    arguments = {name: value for name in ADAMW if (value := getattr(settings, name)) is not None} | settings.args
    if settings.name == "adamw":
        parameters = [parameter for group in groups for parameter in group["params"]]
        unscaled = trainer is None or not (
            getattr(trainer.precision_plugin, "scaler", None) or trainer.gradient_clip_val
        )
        fused = (unscaled and all(p.device.type in FUSED for p in parameters)) or None
        arguments = {"fused": fused} | ADAMW | arguments
    return create_optimizer_v2(groups, settings.name, lr=settings.lr, weight_decay=settings.weight_decay, **arguments)

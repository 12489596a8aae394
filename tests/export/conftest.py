"""A training run of each kind as it lies on the disk, without training; small models by graphs."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
import yaml

from diffvision import nn
from diffvision.models import language
from diffvision.training.classification import ClassificationModule
from diffvision.training.clip import ContrastiveModule

METRICS = """epoch,step,train/loss,lambda/blocks.0.attn,zero_shot/digits/acc1,val/acc1,data/seen,data/skipped
0,9,2.5,0.80,,,,
0,19,2.0,0.81,,,,
0,19,,,0.50,0.40,,
0,19,,,,,640.0,2.0
1,39,1.5,0.82,,,,
1,39,,,0.75,0.60,,
1,39,,,,,640.0,0.0
"""


def write_run(folder: Path, checkpoint: dict, data: dict, step: int = 20) -> Path:
    """A run's directory with a checkpoint of `step` steps; returns the checkpoint's path."""
    (folder / "checkpoints").mkdir(parents=True)
    ema = {"class_path": "diffvision.training.ema.EMA", "init_args": {"decay": 0.9}}
    model = {"model": "a model", "optimizer": {"lr": 0.001, "clip_norm": None}}
    config = {
        "seed_everything": 0,
        "trainer": {"max_epochs": 2, "callbacks": [ema]},
        "model": {"class_path": "Module", "init_args": model},
        "data": {"class_path": "Data", "init_args": data},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metrics.csv").write_text(METRICS)
    path = folder / "checkpoints" / "best.ckpt"
    torch.save({"pytorch-lightning_version": "2.6.6", "global_step": step, **checkpoint}, path)
    return path


def saved(module) -> dict:
    """What the module and its averages put into a checkpoint: the averages are `state_dict`."""
    checkpoint: dict = {"state_dict": {f"model.{k}": v for k, v in module.model.state_dict().items()}}
    checkpoint["current_model_state"] = {k: torch.zeros_like(v) for k, v in checkpoint["state_dict"].items()}
    module.on_save_checkpoint(checkpoint)
    return checkpoint


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """`clip`, `vision` and `text`: the modules; `paths`: their checkpoints."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("runs")
    digits = folder / "digits"
    digits.mkdir()
    (digits / "classnames.txt").write_text("zero\none\ntwo\n")
    clip = ContrastiveModule("DiffCLIP-debug", preprocess={"mean": [0.3, 0.3, 0.3], "interpolation": "bilinear"})
    args = {"img_size": 48, "drop_path_rate": 0.1}
    vision = ClassificationModule("diff_vit_debug", num_classes=3, model_args=args)
    text = language.create("diff-debug", vocab_size=20).eval()
    paths = {
        "clip": write_run(folder / "clip", saved(clip), {"train": "/home/someone/data/digits/train"}),
        "vision": write_run(folder / "vision", saved(vision), {"train": "digits", "evaluation": str(digits)}, step=40),
        "text": write_run(
            folder / "text",
            {
                "state_dict": {f"model.{k}": v for k, v in text.state_dict().items()},
                "hyper_parameters": {"config": dataclasses.asdict(text.config)},
                "diffvision": {"model": "diff-debug", "tokenizer": None},
            },
            {"train": "text"},
        ),
    }
    return SimpleNamespace(clip=clip, vision=vision, text=text, paths=paths, folder=folder)


@pytest.fixture(scope="session")
def exported(runs, tmp_path_factory):
    """The folders that `diffvision export` writes of the runs."""
    from diffvision.export.export_commands import export

    folder = tmp_path_factory.mktemp("exported")
    export(str(runs.paths["clip"]), str(folder / "clip"), license="apache-2.0")
    export(str(runs.paths["vision"]), str(folder / "vision"))
    return folder


def filled(model: torch.nn.Module) -> torch.nn.Module:
    """The model with noise on each parameter, so that none stands at the value it begins with."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture(scope="session")
def vit():
    """variant -> a ViT of one small block of it."""

    def made(variant: str) -> torch.nn.Module:
        model = timm.create_model("plain_vit_debug", depth=1)
        for depth, block in enumerate(model.blocks):
            width = block.attn.proj.out_features
            block.attn = nn.build_attention(variant, width, 2, qkv_bias=True, depth=depth)
        return filled(model)

    return made

"""What the LightningDataModules of images and of text have in common: settings of the model, ranks, loaders."""

from typing import Any

import lightning.pytorch as pl

from diffvision.data.shards.loader import EvaluationLoader, ShardLoader
from diffvision.data.shards.sample import SampleKind, SampleSource


def training_loader(data: Any, source: SampleSource, kind: SampleKind) -> ShardLoader:
    """Return the training batches of a DataModule, from the trainer's current epoch on."""
    rank, world_size = rank_and_world_size(data)
    loader = ShardLoader(
        source,
        kind,
        data.batch_size,
        seed=data.seed,
        num_workers=data.num_workers,
        rank=rank,
        world_size=world_size,
        window=data.window,
        limits=data.limits,
        stall_timeout=data.stall_timeout,
    )
    if data.trainer is not None:
        loader.set_epoch(data.trainer.current_epoch)
    return loader


def evaluation_loader(data: Any, source: SampleSource, kind: SampleKind) -> EvaluationLoader:
    """Return the evaluation batches of a DataModule: every sample once over all ranks."""
    rank, world_size = rank_and_world_size(data)
    batch_size = data.eval_batch_size or max(1, data.batch_size // world_size)
    return EvaluationLoader(
        source, kind, batch_size, data.num_workers, rank, world_size, data.limits, data.stall_timeout
    )


def setting_or_model(data: pl.LightningDataModule, name: str) -> Any:
    """Return a setting of the data, or the LightningModule's attribute of that name where the setting is None."""
    value = getattr(data, name)
    module = data.trainer.lightning_module if data.trainer is not None else None
    return getattr(module, name, None) if value is None else value


def rank_and_world_size(data: Any) -> tuple[int, int]:
    """Return the trainer's rank and world size, or those of a single process without a trainer."""
    return (data.trainer.global_rank, data.trainer.world_size) if data.trainer is not None else (0, 1)

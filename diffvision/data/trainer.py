"""The base class of the LightningDataModules of images and of text: their loaders, and settings of the model."""

from typing import Any

import lightning.pytorch as pl

from diffvision.data.shards.loader import EvaluationLoader, ShardLoader
from diffvision.data.shards.report import Limits
from diffvision.data.shards.sample import SampleKind, SampleSource
from diffvision.data.shards.worker_batches import STALL_TIMEOUT


class LoaderData(pl.LightningDataModule):
    """Shards or images, read by our loaders.

    Args:
        batch_size: global, over all ranks.
        eval_batch_size: on each rank; by default a rank's share of `batch_size`.
        num_workers: processes that read and decode, on each rank.
        seed: with the epoch, it determines the order of the samples.
        max_bad_fraction: bad samples are skipped and counted; more of them than this stop the run.
        window: shards shuffled together.
        stall_timeout: seconds that the next batch may take before the run stops.
    """

    evaluation: Any = None

    def __init__(
        self,
        batch_size: int,
        *,
        eval_batch_size: int | None = None,
        num_workers: int = 2,
        seed: int = 0,
        max_bad_fraction: float = 0.01,
        window: int = 16,
        stall_timeout: float = STALL_TIMEOUT,
    ) -> None:
        super().__init__()
        self.batch_size, self.eval_batch_size, self.num_workers = batch_size, eval_batch_size, num_workers
        self.seed, self.window, self.stall_timeout = seed, window, stall_timeout
        self.limits = Limits(max_bad_fraction)

    def read_training(self, source: SampleSource, kind: SampleKind) -> ShardLoader:
        """Return training batches, from the trainer's current epoch on."""
        rank, world_size = self.rank_and_world_size()
        loader = ShardLoader(
            source,
            kind,
            self.batch_size,
            seed=self.seed,
            num_workers=self.num_workers,
            rank=rank,
            world_size=world_size,
            window=self.window,
            limits=self.limits,
            stall_timeout=self.stall_timeout,
            repeats=bool(getattr(self.trainer, "overfit_batches", 0)),
        )
        if self.trainer is not None:
            loader.set_epoch(self.trainer.current_epoch)
        return loader

    def read_evaluation(self, source: SampleSource, kind: SampleKind) -> EvaluationLoader:
        """Return evaluation batches: every sample once over all ranks."""
        rank, world_size = self.rank_and_world_size()
        batch_size = self.eval_batch_size or max(1, self.batch_size // world_size)
        return EvaluationLoader(
            source, kind, batch_size, self.num_workers, rank, world_size, self.limits, self.stall_timeout
        )

    def setting_or_model(self, name: str) -> Any:
        """Return a setting, or the LightningModule's attribute of that name where the setting is None."""
        value = getattr(self, name)
        module = self.trainer.lightning_module if self.trainer is not None else None
        return getattr(module, name, None) if value is None else value

    def rank_and_world_size(self) -> tuple[int, int]:
        """Return the trainer's rank and world size, or those of a single process without a trainer."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

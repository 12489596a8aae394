"""Training with Lightning: modules, optimizer, callbacks and the `fit` command.

    from diffvision.training import ContrastiveModule

Names are imported when they are first used, because each needs another library. `fault_tolerance` keeps a run alive.
"""

from typing import TYPE_CHECKING

from diffvision.lazy import lazy_names

if TYPE_CHECKING:
    from diffvision.training.callbacks import (
        DataReport,
        LambdaAnnealing,
        LambdaMonitor,
        LambdaWarmup,
        Throughput,
        TrainOnlyNew,
    )
    from diffvision.training.classification import ClassificationModule
    from diffvision.training.clip import ContrastiveModule
    from diffvision.training.distillation import Distillation
    from diffvision.training.ema import EMA
    from diffvision.training.fault_tolerance import LastCheckpoint, StepGuard
    from diffvision.training.language import LanguageModule
    from diffvision.training.optim import OptimizerSettings
    from diffvision.training.progress import ProgressLine
    from diffvision.training.vision_language import Lora, VisionLanguageModule

_NAMES = {
    "callbacks": "DataReport LambdaAnnealing LambdaMonitor LambdaWarmup Throughput TrainOnlyNew",
    "classification": "ClassificationModule",
    "clip": "ContrastiveModule",
    "distillation": "Distillation",
    "ema": "EMA",
    "fault_tolerance": "LastCheckpoint StepGuard",
    "language": "LanguageModule",
    "optim": "OptimizerSettings",
    "progress": "ProgressLine",
    "vision_language": "Lora VisionLanguageModule",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = [
    "EMA",
    "ClassificationModule",
    "ContrastiveModule",
    "DataReport",
    "Distillation",
    "LambdaAnnealing",
    "LambdaMonitor",
    "LambdaWarmup",
    "LanguageModule",
    "LastCheckpoint",
    "Lora",
    "OptimizerSettings",
    "ProgressLine",
    "StepGuard",
    "Throughput",
    "TrainOnlyNew",
    "VisionLanguageModule",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)

"""Opening of models: `open_model(spec)` returns a `Model`, built by timm, OpenCLIP, transformers or diffvision.

Evaluation, export, inspection and the commands open their models here. Training builds its models in `training`. Names
are imported when they are first used, because PyTorch takes long.
"""

from typing import TYPE_CHECKING

from diffvision.lazy import lazy_names

if TYPE_CHECKING:
    from diffvision.opening.model import Library, Model
    from diffvision.opening.open_models import open_model, open_native
    from diffvision.opening.run_folders import best_checkpoint, find_run
    from diffvision.opening.specs import check_spec, split_label

_MODULES = {
    "Library": "model",
    "Model": "model",
    "best_checkpoint": "run_folders",
    "check_spec": "specs",
    "split_label": "specs",
    "open_model": "open_models",
    "open_native": "open_models",
    "find_run": "run_folders",
}
__all__ = ["Library", "Model", "best_checkpoint", "check_spec", "find_run", "open_model", "open_native", "split_label"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)

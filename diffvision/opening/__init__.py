"""Opening of models: `open_model(spec)` returns a `Model`, built by timm, OpenCLIP, transformers or diffvision.

Evaluation, export, inspection and the commands open their models here. Training builds its models in `training`. Names
are imported when they are first used, because PyTorch takes long.
"""

from typing import TYPE_CHECKING

from diffvision.lazy import lazy_names

if TYPE_CHECKING:
    from diffvision.opening.grammar import folder_host, open_model, open_ours
    from diffvision.opening.model import Host, Model
    from diffvision.opening.run_folders import best_checkpoint, run_in
    from diffvision.opening.specs import check_spec, labelled

_MODULES = {
    "Host": "model",
    "Model": "model",
    "best_checkpoint": "run_folders",
    "check_spec": "specs",
    "folder_host": "grammar",
    "labelled": "specs",
    "open_model": "grammar",
    "open_ours": "grammar",
    "run_in": "run_folders",
}
__all__ = [
    "Host",
    "Model",
    "best_checkpoint",
    "check_spec",
    "folder_host",
    "labelled",
    "open_model",
    "open_ours",
    "run_in",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)

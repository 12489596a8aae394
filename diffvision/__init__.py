"""Differential attention for vision and multimodal learning.

Importing the package registers its models with timm (`timm.create_model("diff_vit_base")`) and OpenCLIP
(`open_clip.create_model("DiffCLIP-ViT-B-16")`). It imports neither: the models are registered as soon as timm or
OpenCLIP is imported. `fit`, `evaluate` and `compare` are the commands of these names, for scripts and notebooks.
"""

from typing import TYPE_CHECKING

from diffvision.lazy import lazy_names
from diffvision.progress import import_tqdm, in_notebook
from diffvision.registration import register

if TYPE_CHECKING:
    from diffvision import models
    from diffvision.comparison.compare_command import compare
    from diffvision.evaluation.evaluate_command import evaluate
    from diffvision.models.adapt import adapt
    from diffvision.opening import Model, open_model
    from diffvision.training.from_python import fit

__version__ = "0.1.0"

__all__ = ["Model", "__version__", "adapt", "compare", "evaluate", "fit", "models", "open_model"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Model": "opening",
            "adapt": "models.adapt",
            "compare": "comparison.compare_command",
            "evaluate": "evaluation.evaluate_command",
            "fit": "training.from_python",
            "models": None,
            "open_model": "opening",
        },
    )

if in_notebook():
    import_tqdm()  # before timm and OpenCLIP import it, with its advice to install ipywidgets
register("timm")
register("open_clip")
register("transformers.models.auto.configuration_auto")

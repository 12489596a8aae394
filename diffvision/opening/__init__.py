"""Opening of models: `open_model(spec)` returns a `Model`, built by timm, OpenCLIP, transformers or diffvision.

Evaluation, export, inspection and the commands open their models here. Training builds its models in `training`.
"""

from diffvision.opening.grammar import check_spec, folder_host, labelled, open_model
from diffvision.opening.model import Host, Model

__all__ = ["Host", "Model", "check_spec", "folder_host", "labelled", "open_model"]

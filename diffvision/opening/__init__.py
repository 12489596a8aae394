"""The one notion of a loaded model: `open_model(spec)` gives a `Model`, whichever host builds it.

Evaluation, export, inspection and the commands take models from here. What of a model is trained is in `training`.
"""

from diffvision.opening.grammar import folder_host, labelled, open_image_model, open_language_model, open_model
from diffvision.opening.model import Host, Model

__all__ = ["Host", "Model", "folder_host", "labelled", "open_image_model", "open_language_model", "open_model"]

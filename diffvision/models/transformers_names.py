"""The names of our configurations in transformers' table, whose classes are imported when one is looked up.

`diffvision.registration` imports this module as soon as transformers has imported its table, which takes no time;
importing the classes takes seconds. Private name of transformers: `CONFIG_MAPPING._modules`, where the table keeps the
modules of its configurations.
"""

from importlib import import_module
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

MODULES = {
    "timm_llava": ("diffvision.models.timm_llava", "TimmLlavaConfig"),
}
"""model_type -> the module that registers its classes, and the configuration in it."""


class Lazy:
    """Imports a module when an attribute is first read."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_module(self._module), name)


for _model_type, (_module, _configuration) in MODULES.items():
    CONFIG_MAPPING_NAMES.setdefault(_model_type, _configuration)
    CONFIG_MAPPING._modules.setdefault(_model_type, Lazy(_module))

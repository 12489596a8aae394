"""Old names of modules, classes and functions: they keep working until 1.0, with a FutureWarning that says the new one.

They appear in other people's imports, in the class paths of configurations, in pickles and in exported folders.

To move a module, add a row to `MODULES`. A package's row also covers the modules inside it.

To rename a class or function, or to move it to another module, add a row to `NAMES`. If its old module still exists,
end that module with

    if not TYPE_CHECKING:
        __getattr__ = get_renamed(__name__)

unless it is a package with `lazy_names`, which looks here. Name the old module as it is called today: rows of `MODULES`
apply first. For a module that was split, map it to the module with most of its names, and add rows for the others.
`tests/test_moved.py` runs over both tables.

With 1.0 this module goes, together with its uses.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MATHEMATICS = "diffvision.evaluation.language.mathematics"
_FAITHFULNESS = "diffvision.evaluation.language.faithfulness"

MODULES = {
    "diffvision.analysis.lookback": "diffvision.lab.lookback_ratios",
    "diffvision.analysis.pruning": "diffvision.lab.pruning",
    "diffvision.answer": "diffvision.lab.answer",
    **{
        f"diffvision.data.made.{name}": f"diffvision.lab.datasets.{name}"
        for name in (
            "arithmetic",
            "arithmetic_text",
            "cutouts",
            "dictionaries",
            "digit_scenes",
            "emoji",
            "emoji_table",
            "fashion_scenes",
            "mapping_text",
            "markup",
            "openclipart",
            "recall",
            "text",
            "tuxpaint",
        )
    },
    "diffvision.comparison.output": "diffvision.comparison.page",
    "diffvision.data.images.captions": "diffvision.data.images.caption_tokenizer",
    "diffvision.data.shards.batch_reader": "diffvision.data.shards.loader",
    "diffvision.data.shards.evaluation_loader": "diffvision.data.shards.loader",
    "diffvision.data.shards.expected": "diffvision.data.shards.reader",
    "diffvision.data.shards.locks": "diffvision.files",
    "diffvision.data.shards.verify": "diffvision.data.shards.sidecars",
    **{f"diffvision.demo.{name}": f"diffvision.lab.demo.{name}" for name in ("text", "text_page")},
    **{
        f"diffvision.evaluation.language.{name}": f"diffvision.lab.language.{name}"
        for name in (
            "associative_recall",
            "attention_mass",
            "cache_pruning",
            "chats",
            "generations",
            "heads",
            "label_mapping",
            "lookback",
            "low_bit",
            "many_shot",
            "outliers",
            "quantization",
            "recall_errors",
            "rounding",
        )
    },
    "diffvision.evaluation.language.faithfulness": "diffvision.lab.faithfulness",
    "diffvision.evaluation.language.mathematics": "diffvision.lab.mathematics",
    "diffvision.evaluation.language.records": "diffvision.evaluation.records",
    "diffvision.export.citations": "diffvision.export.card",
    "diffvision.export.extras": "diffvision.export.formats",
    "diffvision.export.options": "diffvision.export.formats",
    "diffvision.models.vision": "diffvision.models.vit",
    "diffvision.nn.lambdas": "diffvision.nn.lambda_variants",
    "diffvision.ops.attention.eager": "diffvision.ops.attention.reference",
    "diffvision.training.durable": "diffvision.training.fault_tolerance",
}
"""old module or package -> new"""

NAMES: dict[str, str] = {
    "diffvision.nn.diff_attention:depth_lambda_init": "diffvision.nn.lambda_init:depth_lambda_init",
    **{
        f"diffvision.analysis.figures.language:{name}": f"diffvision.lab.language.figures:{name}"
        for name in (
            "attention_bars",
            "error_curves",
            "faithfulness_bars",
            "lookback_bars",
            "low_bit_panels",
            "many_shot_panels",
            "math_panels",
            "outlier_bars",
            "pruning_curves",
            "quantization_curves",
            "recall_bars",
        )
    },
    **{
        f"diffvision.analysis.maps:{old}": "diffvision.analysis.maps:compute_layer_maps"
        for old in ("opened", "open_call")
    },
    "diffvision.analysis.maps:opened_layers": "diffvision.analysis.maps:open_layers",
    "diffvision.analysis.statistics:gini": "diffvision.lab.language.cache_pruning:gini",
    "diffvision.analysis.statistics:keys_for": "diffvision.lab.language.cache_pruning:keys_for",
    "diffvision.evaluation.intervals:cohen_kappa": "diffvision.lab.faithfulness.task:cohen_kappa",
    **{
        f"diffvision.inspection.inputs:{old}": f"diffvision.inspection.inputs:{new}"
        for old, new in (
            ("captions", "read_captions"),
            ("passages", "read_passages"),
            ("transformed", "transform_picture"),
        )
    },
    "diffvision.models.vit:ContrastTransformer": "diffvision.models.vit:GridTransformer",
    "diffvision.data.made.needle_text:training_documents": (
        "diffvision.lab.datasets.needle_documents:training_documents"
    ),
    "diffvision.training.fault_tolerance:gathered": "diffvision.training.fault_tolerance:gather",
    "diffvision.training.fault_tolerance:spread": "diffvision.training.fault_tolerance:spread_nan",
    "diffvision.training.optim:adamw": "diffvision.training.optim:create_optimizer",
    "diffvision.training.optim:WarmupDecay": "diffvision.training.schedule:WarmupDecay",
}
"""old "module:name" -> new "module:name" """


def find_current(path: str) -> str:
    """Return the current path of a module, class or function, such as "package.module.Class"."""
    if (row := _find_row(path)) is not None:
        path = MODULES[row] + path.removeprefix(row)
    module, _, name = path.rpartition(".")
    return NAMES.get(f"{module}:{name}", path).replace(":", ".")


def get_renamed(module: str, stacklevel: int = 2) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module with rows in `NAMES`.

    Args:
        module: the module's `__name__`.
        stacklevel: of the warning; one more for each function in between.
    """

    def get(name: str) -> Any:
        """Return what an old name stands for now, with a warning."""
        if (new := NAMES.get(f"{module}:{name}")) is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=sys.modules.get(module))
        _warn(f"{module}.{name}", new.replace(":", "."), stacklevel + 1)
        new_module, _, new_name = new.partition(":")
        value = getattr(import_module(new_module), new_name)
        setattr(sys.modules[module], name, value)
        return value

    return get


def import_old_names() -> None:
    """Let old names of modules be imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _find_row(module: str) -> str | None:
    while module and module not in MODULES:
        module = module.rpartition(".")[0]
    return module or None


def _warn(old: str, new: str, stacklevel: int) -> None:
    message = f"{old} is now {new}: use the new name, since 1.0 will not have the old one"
    warnings.warn(message, FutureWarning, stacklevel=stacklevel)


class _Finder(MetaPathFinder):
    """Import hook for the old names of modules.

    It precedes Python's own finders. They would find a module of a moved package by the package's new path, and import
    it a second time under its old name.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("diffvision.") or _find_row(fullname) is None:
            return None
        return ModuleSpec(fullname, _Loader())


class _Loader(Loader):
    """Loader that gives an old name of a module to the module of the new name."""

    def exec_module(self, module: ModuleType) -> None:
        row = _find_row(module.__name__)
        assert row is not None
        if row == module.__name__:  # a moved package warns, and not again for each module inside it
            _warn(row, MODULES[row], 3)
        sys.modules[module.__name__] = import_module(find_current(module.__name__))

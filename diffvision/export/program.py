"""The export by torch.export: programs that torch runs or compiles without this package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.export import Dim, ExportedProgram

from diffvision.export.formats import Options
from diffvision.export.graphs import Graph, graphs
from diffvision.models.modes import evaluating
from diffvision.opening import Model
from diffvision.ops import attention_backend

ABOUT = "about.json"


def export_program(graph: Graph, backend: str = "auto") -> ExportedProgram:
    """Return a graph of `graphs(model)` by torch.export, in evaluation mode, for a batch of any size.

    It traces with `strict=False`: with `strict=True`, Dynamo would have to follow the checks of arguments in our
    operation.

    Args:
        graph: of `graphs(model)`.
        backend: of our operation: "auto" keeps torch's scaled_dot_product_attention, of which a device takes its
            fastest kernel.

    Raises:
        ValueError: torch.export cannot follow the model.
    """
    shapes = ({0: Dim("batch", min=1)},)
    with evaluating(graph.module), attention_backend(backend):
        try:
            return torch.export.export(graph.module, tuple(graph.inputs.values()), dynamic_shapes=shapes, strict=False)
        except Exception as error:  # of any class: tracing runs the model's Python
            raise ValueError(
                f"{type(graph.module).__name__} cannot be exported: {str(error).strip().splitlines()[0]}"
            ) from error


def save_program(program: ExportedProgram, file: str | Path, about: Mapping[str, str] | None = None) -> None:
    """Write a .pt2 file, with `about.json` in it (`torch.export.load(file, extra_files={"about.json": ""})`)."""
    torch.export.save(program, file, extra_files={ABOUT: json.dumps(dict(about or {}), indent=2)})


def write_programs(model: Model, destination: Path, options: Options) -> None:
    """Write the format "program": a folder with a .pt2 file for each graph."""
    destination.mkdir()
    for name, graph in graphs(model.module, name=model.name, preprocess=model.preprocess).items():
        save_program(export_program(graph), destination / f"{name}.pt2", graph.about)

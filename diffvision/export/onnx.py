"""The export to ONNX, the format of onnxruntime and other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from diffvision.export.formats import Options, check_installed
from diffvision.export.graphs import Graph, graphs
from diffvision.export.program import export_program
from diffvision.opening import Model


def save_onnx(graph: Graph, file: str | Path) -> None:
    """Write a graph of `graphs(model)` as an ONNX model with its metadata, and check it.

    Weights of more than 2 GB, the limit of protobuf, are written next to it in FILE.data.

    Args:
        graph: the graph to write.
        file: the .onnx file.

    Raises:
        ValueError: onnx is not installed, the model cannot be exported, or onnx finds an error in the result.
    """
    check_installed("onnx")
    import onnx

    # The plain formula: half of the products that V1 takes by scaled_dot_product_attention, which is not one node here.
    program = export_program(graph, "eager")
    names: Any = {"input_names": list(graph.inputs), "output_names": [graph.output]}
    written: Any = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    _describe(written.model, graph)
    written.save(str(file))
    try:
        onnx.checker.check_model(str(file))
    except onnx.checker.ValidationError as error:
        raise ValueError(f"onnx rejects {file}: {str(error).splitlines()[0]}") from error


def write_onnx(model: Model, destination: Path, options: Options) -> None:
    """Write the format "onnx": a folder with a .onnx file for each graph."""
    destination.mkdir()
    for name, graph in graphs(model.module, name=model.name, preprocess=model.preprocess).items():
        save_onnx(graph, destination / f"{name}.onnx")


def _describe(model: Any, graph: Graph) -> None:
    """Name the batch, and replace the metadata of the tracing, which has local paths, by the graph's."""
    batch = str(model.graph.inputs[0].shape[0])
    model.metadata_props.clear()
    model.metadata_props.update(graph.about)
    values = [*model.graph.inputs, *model.graph.outputs]
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        values += node.outputs
    for value in values:
        value.metadata_props.clear()
        if value.shape is not None:
            for axis, size in enumerate(value.shape):
                if str(size) == batch:
                    value.shape[axis] = "batch"

"""How far onnxruntime and a loaded torch.export program are from the model itself, by kind of model.

    python scripts/benchmarks/export_parity.py   differences, sizes of files: docs/benchmarks/export_parity.json
    python scripts/benchmarks/export_parity.py --time     onnxruntime against torch for one sample, in turns

Weights are random, with noise on each parameter so that none has its initial value. Batches are of 1 and 3
rows; 2 were traced.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import onnxruntime
import open_clip
import timm
import torch

import diffvision
from diffvision import nn
from diffvision.export.graphs import Graph, graphs
from diffvision.export.onnx import save_onnx
from diffvision.export.program import export_program, save_program

TIMED = ("diff_vit_small", "ViT-B-16", "DiffCLIP-ViT-B-16", "DiffCLIP-V2-ViT-B-16")


def models() -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the names of small models, and the models."""
    for variant in nn.ATTENTION:
        vit = timm.create_model("plain_vit_debug")
        for depth, block in enumerate(vit.blocks):
            block.attn = nn.build_attention(variant, block.attn.proj.out_features, 2, qkv_bias=True, depth=depth)
        yield f"ViT, {variant}", vit
    for method in ("v2", "dex", "v1"):
        vit = diffvision.adapt(timm.create_model("plain_vit_debug"), method)
        if method == "dex":
            diffvision.models.adapt.set_dex_lambda(vit, 0.5)
        yield f"ViT, adapted by {method}", vit
    for name in ("vit_dwee_patch16_reg1_gap_256", "vit_dpwee_patch16_reg1_gap_256"):
        yield name, timm.create_model(name)
    yield "ViT, VCA", timm.create_model("vca_vit_debug")
    for name in ("CLIP-debug", "DiffCLIP-debug", "DiffCLIP-DINT-debug", "DiffCLIP-V2-debug"):
        yield name, open_clip.create_model(name)


def inputs(graph: Graph, batch: int) -> list[torch.Tensor]:
    """Return inputs of another batch and length than those that were traced."""
    made = []
    for name, example in graph.inputs.items():
        shape = list(example.shape)
        for axis, free in graph.axes[name].items():
            shape[axis] = batch if free == "batch" else shape[axis] + 5
        made.append(torch.randint(1, 9, shape) if example.dtype == torch.int64 else torch.randn(shape))
    return made


def compare(graph: Graph, model: torch.nn.Module, folder: Path) -> tuple[float, float, int, int]:
    """Return the largest differences of the program's and onnxruntime's outputs to the model's, and bytes of files."""
    save_program(export_program(graph), folder / "graph.pt2")
    save_onnx(graph, folder / "graph.onnx")
    program, session = (
        torch.export.load(folder / "graph.pt2").module(),
        onnxruntime.InferenceSession(folder / "graph.onnx"),
    )
    worst = [0.0, 0.0]
    for batch in (1, 3):
        given = inputs(graph, batch)
        with torch.no_grad():
            expected, ours = (
                [out] if isinstance(out, torch.Tensor) else list(out) for out in (model(*given), program(*given))
            )
        theirs = session.run(None, {name: value.numpy() for name, value in zip(graph.inputs, given, strict=True)})
        for index, outputs in enumerate((ours, map(torch.as_tensor, theirs))):
            for one, other in zip(expected, outputs, strict=True):
                worst[index] = max(worst[index], (one - other).abs().max().item())
    return *worst, (folder / "graph.pt2").stat().st_size, (folder / "graph.onnx").stat().st_size


def table() -> None:
    print("| model | graph | torch.export | onnxruntime | .pt2, MB | .onnx, MB |\n|---|---|---:|---:|---:|---:|")
    for name, model in models():
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        for part, graph in graphs(model.eval()).items():
            with tempfile.TemporaryDirectory() as folder:
                program, onnx, *sizes = compare(graph, model if part == "model" else graph.module, Path(folder))
            mb = " | ".join(f"{size / 1e6:.2f}" for size in sizes)
            print(f"| {name} | {part} | {program:.1e} | {onnx:.1e} | {mb} |", flush=True)


def timed(rounds: int = 40) -> None:
    """Print how long onnxruntime and torch take for one sample on two cores, in turns, with quartiles of the ratio."""
    torch.set_num_threads(2)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    # Or it holds the cores in torch's turns.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    print("| model | graph | torch, ms | onnxruntime, ms | ratio (quartiles) |\n|---|---|---:|---:|---:|")
    for name in TIMED:
        model = timm.create_model(name) if "vit" in name else open_clip.create_model(name)
        for part, graph in graphs(model.eval()).items():
            run = model if part == "model" else graph.module
            with tempfile.TemporaryDirectory() as folder:
                save_onnx(graph, Path(folder) / "graph.onnx")
                session = onnxruntime.InferenceSession(Path(folder) / "graph.onnx", options)
            given = [example[:1] for example in graph.inputs.values()]
            arrays = {key: value.numpy() for key, value in zip(graph.inputs, given, strict=True)}
            took: dict[str, list[float]] = {"torch": [], "onnxruntime": []}
            with torch.inference_mode():
                for _ in range(rounds):
                    start = time.perf_counter()
                    run(*given)
                    middle = time.perf_counter()
                    session.run(None, arrays)
                    took["torch"].append(middle - start)
                    took["onnxruntime"].append(time.perf_counter() - middle)
            first, second = (f"{1e3 * statistics.median(values[5:]):.1f}" for values in took.values())
            ratios = [b / a for a, b in zip(took["torch"][5:], took["onnxruntime"][5:], strict=True)]
            low, middle_one, high = statistics.quantiles(ratios)
            print(f"| {name} | {part} | {first} | {second} | {middle_one:.2f} ({low:.2f} to {high:.2f}) |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true")
    timed() if parser.parse_args().time else table()

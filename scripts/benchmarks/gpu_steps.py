"""Step time and peak memory of models on one device: ours, plain ones, and timm's, OpenCLIP's or transformers'.

    python scripts/benchmarks/gpu_steps.py [--device cuda] [--minutes 8.5] [--quick] --output DIR

adds to DIR/steps.json after each model and leaves out what is there, so that a second call resumes the first. A step is
forward, backward and AdamW (fused on CUDA), in bfloat16 autocast over float32 weights, on random data that lie on the
device. Each model is built, called three times, timed and freed again before the next one, since not all fit together;
a step's time is the median over 10 steps, each synchronised. Peak memory is all that torch allocated: weights,
gradients, optimizer and activations. Ours and the plain ones are also timed as compiled by torch.compile with default
settings. `--quick` has tiny models and batches, to try the script itself.
"""

import dataclasses
import gc
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn

import bench_language
import bench_models
from benchmark import arguments, parse, peak_memory, progress, synchronize, training_step
from diffvision.models import language
from machine import environment

WARM, STEPS = 3, 10


class Setting(NamedTuple):
    """Models that are compared: name -> (role, what creates it), and the batch of all."""

    name: str
    items: str  # what a rate counts: images, pairs or tokens
    count: int  # of them in a step
    models: dict[str, tuple[str, Callable[[], nn.Module]]]
    batch: Callable[[str], Any]
    loss: Callable[[str, nn.Module, Any], Tensor]


def vit_setting(batch: int, quick: bool) -> Setting:
    if quick:
        names, image = {"plain_vit_debug": "plain", "diff_vit_debug": "ours"}, 32
    else:
        names, image = {"vit_base_patch16_224": "plain", "diff_vit_base": "ours", "diffv2_vit_base": "ours"}, 224
    models = {name: (role, partial(timm.create_model, name)) for name, role in names.items()}
    if not quick:
        peer = partial(timm.create_model, "vit_base_patch16_224", attn_layer="diff", num_heads=6)
        models["timm's diff, 6 heads"] = ("peer", peer)
    made = partial(vit_batch, batch, image, 10 if quick else 1000)
    name = f"ViT-B/16, batch {batch}"
    return Setting(name, "images", batch, models, made, lambda _, m, b: bench_models.vit_loss(m, b))


def vit_batch(size: int, image: int, classes: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, image, image, device=device), torch.randint(classes, (size,), device=device)


def clip_setting(batch: int, quick: bool) -> Setting:
    if quick:
        names, image = {"CLIP-debug": "plain", "DiffCLIP-debug": "ours"}, 32
    else:
        names, image = {"CLIP-ViT-B-16": "plain", "DiffCLIP-ViT-B-16": "ours", "DiffCLIP-V2-ViT-B-16": "ours"}, 224
        names["ViT-B-16"] = "peer"  # OpenCLIP's own
    models = {name: (role, partial(bench_models.open_clip_model, name)) for name, role in names.items()}
    made = partial(clip_batch, batch, image, *((24, 400) if quick else (77, 49000)))
    name = f"CLIP ViT-B/16, batch {batch}"
    return Setting(name, "pairs", batch, models, made, lambda _, m, b: bench_models.clip_loss(m, b))


def clip_batch(size: int, image: int, length: int, words: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, image, image, device=device), torch.randint(1, words, (size, length), device=device)


def language_setting(size: str, batch: int, tokens: int) -> Setting:
    models: dict[str, tuple[str, Callable[[], nn.Module]]] = {}
    for family in language.FAMILIES:
        create = partial(language.create, f"{family}-{size}", max_length=tokens)
        models[f"{family}-{size}"] = ("plain" if family == "transformer" else "ours", create)
    if importlib.util.find_spec("transformers") is not None:
        shape = dataclasses.replace(language.SIZES[size], max_length=tokens)
        for name in bench_language.PEERS:
            models[name] = ("peer", partial(bench_language.hugging_face, name, shape))
    made = partial(language_batch, batch, tokens, language.SIZES[size].vocab_size)
    name = f"language {size}, {batch} x {tokens}"
    return Setting(name, "tokens", batch * tokens, models, made, bench_language.loss_of)


def language_batch(batch: int, tokens: int, vocabulary: int, device: str) -> Tensor:
    return torch.randint(vocabulary, (batch, tokens + 1), device=device)


def settings(quick: bool) -> list[Setting]:
    """Return the settings in order of worth."""
    if quick:
        return [vit_setting(2, True), clip_setting(2, True), language_setting("debug", 2, 16)]
    return [
        vit_setting(256, False),
        clip_setting(256, False),
        language_setting("830m", 4, 2048),
        clip_setting(512, False),
        language_setting("830m", 1, 8192),
        vit_setting(512, False),
    ]


def measure(setting: Setting, name: str, compiled: bool, args: Any) -> dict[str, Any]:
    """Return the times of a model's step and its peak memory, or why there are none."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    role, create = setting.models[name]
    try:
        model = create().to(args.device).train()
        batch = setting.batch(args.device)
        loss = partial(setting.loss, name, model, batch)
        compile_loss = partial(torch.compile, backend="eager" if args.quick else "inductor")
        step = training_step(model, compile_loss(loss) if compiled else loss, args)
        start = time.perf_counter()
        for _ in range(WARM):
            step()
        synchronize(args.device)
        warm = time.perf_counter() - start
        times = [timed(step, args.device) for _ in range(STEPS)]
        low, median, high = statistics.quantiles(times, n=4)
        return {
            "role": role,
            "parameters": sum(p.numel() for p in model.parameters()),
            "median_ms": 1e3 * median,
            "quartiles_ms": [1e3 * low, 1e3 * high],
            "times_ms": [1e3 * t for t in times],
            "rate": setting.count / median,
            "warm_s": warm,
            "peak_bytes": peak(step, args.device),
        }
    except Exception as error:  # whatever a model or a compiler may raise is its result
        lines = str(error).strip().splitlines() or [""]
        return {"role": role, "failed": f"{type(error).__name__}: {lines[0]}"[:300]}


def timed(step: Callable[[], Any], device: str) -> float:
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


def peak(step: Callable[[], Any], device: str) -> int:
    """Return the peak of all that is allocated on CUDA, elsewhere of what a step adds."""
    if not device.startswith("cuda"):
        return peak_memory(step, device)
    return torch.cuda.memory_allocated() + peak_memory(step, device)


def free(device: str) -> None:
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def main(given: list[str] | None = None) -> int:
    args = parse(arguments(__doc__ or ""), given)
    file = args.output / "steps.json"
    report = json.loads(file.read_text()) if file.exists() else {"benchmark": "steps", **environment(args.device)}
    results = report.setdefault("settings", {})
    todo = [
        (setting, name, compiled)
        for compiled in (False, True)
        for setting in settings(args.quick)
        for name, (role, _) in setting.models.items()
        if not (compiled and role == "peer")
    ]
    report["left_out"] = len(todo)
    with progress(len(todo), args.minutes) as following:
        for setting, name, compiled in todo:
            title = f"{name}, compiled" if compiled else name
            own = results.setdefault(setting.name, {"items": setting.items, "count": setting.count, "models": {}})
            if title not in own["models"]:
                if not following(f"{setting.name}: {title}"):
                    break
                own["models"][title] = measure(setting, name, compiled, args)
                free(args.device)
            report["left_out"] -= 1
            file.write_text(json.dumps(report, indent=1) + "\n")
    for name, own in results.items():
        for title, result in own["models"].items():
            if "failed" in result:
                print(f"{name}: {title}: {result['failed']}")
            else:
                rate, size = f"{result['rate']:,.0f} {own['items']}/s", f"{result['peak_bytes'] / 2**30:.2f} GiB"
                print(f"{name}: {title}: {result['median_ms']:.1f} ms, {rate}, {size}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What models cost: parameters, FLOPs of a forward pass, and speed, with the models interleaved in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from diffvision.comparison.result import Cost
from diffvision.evaluation.features import autocast
from diffvision.evaluation.options import InferenceSettings
from diffvision.evaluation.output_files import bar
from diffvision.models.modes import evaluating
from diffvision.opening import Model
from diffvision.ops.attention.choice import attention_backend

PASS_SECONDS, TURN_SECONDS = 0.25, 0.2
Inputs = dict[str, Tensor]


def costs(models: Sequence[Model], settings: InferenceSettings, window: int, rounds: int) -> list[Cost]:
    """Count parameters and FLOPs of models, and time them interleaved.

    Each round times every model once, so that a change of the machine's speed is in all of them; a model's ratio to
    the first one is taken within a round.

    Args:
        models: of one kind.
        settings: device and precision; the batch is at most `batch_size` samples.
        window: tokens of a row, for language models.
        rounds: how often each model is timed; 0 for no speed.
    """
    samples = [one_sample(model, window) for model in models]
    measured = [
        Cost(sum(p.numel() for p in model.module.parameters()), count_flops(model, inputs))
        for model, inputs in zip(models, samples, strict=True)
    ]
    if not rounds:
        return measured
    size = min(_batch_size(model, inputs, settings) for model, inputs in zip(models, samples, strict=True))
    batches = [{name: value.repeat_interleave(size, dim=0) for name, value in inputs.items()} for inputs in samples]
    counted = window * size if models[0].is_language else size
    turns = list(zip(models, batches, measured, strict=True))
    for number in bar(range(rounds), "speed"):
        # In reverse every other round, so that no model is always the one after another.
        for model, batch, cost in turns if number % 2 == 0 else turns[::-1]:
            cost.per_second.append(counted / _seconds(model, batch, settings, TURN_SECONDS))
    return measured


def one_sample(model: Model, window: int) -> Inputs:
    """Return one sample as the model reads it: its content changes neither FLOPs nor speed."""
    if model.is_language:
        return {"tokens": torch.zeros(1, window, dtype=torch.int64, device=model.device)}
    inputs = {"image": model.transform(Image.new("RGB", (256, 256), "gray"))[None].to(model.device)}
    if model.tokenizer is not None:
        inputs["text"] = model.tokenizer(["a photo"]).to(model.device)
    return inputs


def forward(model: Any, inputs: Inputs) -> None:
    """Run the towers that have an input."""
    if "tokens" in inputs:
        model(inputs["tokens"])
    elif "text" in inputs:
        model.encode_image(inputs["image"])
        model.encode_text(inputs["text"])
    else:
        model(inputs["image"])


def count_flops(model: Model, inputs: Inputs) -> int:
    """Return the FLOPs of a forward pass by torch's counter: matmuls and convolutions, 2 FLOPs per multiply-accumulate.

    Differential attention is computed by its formula (backend eager), of which the counter sees every matmul. Maps
    of plain attention are counted in full too, causal or not. Softmax, norms and activations are not counted.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one operation of nn.MultiheadAttention that is not counted
    try:
        with evaluating(model.module), attention_backend("eager"), FlopCounterMode(display=False) as counter:
            forward(model.module, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return int(counter.get_total_flops())


def _batch_size(model: Model, sample: Inputs, settings: InferenceSettings) -> int:
    """Return a batch size of which a forward pass takes about `PASS_SECONDS`, at most that of the evaluation."""
    size = 1
    while size < settings.batch_size:
        batch = {name: value.repeat_interleave(size, dim=0) for name, value in sample.items()}
        _seconds(model, batch, settings, 0.0)
        if _seconds(model, batch, settings, 0.0) > PASS_SECONDS / 2:
            break
        size *= 2
    return min(size, settings.batch_size)


def _seconds(model: Model, batch: Inputs, settings: InferenceSettings, least: float) -> float:
    """Return the seconds of a forward pass, the mean over as many as take `least` seconds."""
    wait: Callable[[], Any] = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    with evaluating(model.module), autocast(model.device, settings.precision):
        wait()
        start, passes = time.perf_counter(), 0
        while not passes or time.perf_counter() - start < least:
            forward(model.module, batch)
            wait()
            passes += 1
        return (time.perf_counter() - start) / passes

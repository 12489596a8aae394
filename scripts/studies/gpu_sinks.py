"""Cures where there are sinks: the attention of a gate, V2 and a learned sink on the first token, at 21 million.

Context 1,024, 32,768 tokens a step, 2,000 steps, on the text of `data/gpu_text.py`. Three learning rates are tried on
plain and on V2 by its part `rates`; the gate and the sink take plain's. Two seeds on its part `test`.

Primary: the share of heads that give the first token more than 30% of their attention, mean over queries and texts. Of
V2's difference it is the share of the absolute weights; what a learned sink receives counts as attention elsewhere.
Then the loss, the largest activation, the loss at 4,096 tokens. Declared: a claim only if plain has at least 10% of
such heads in both seeds. A cure works if it has at most a quarter of plain's share in both, and is free if its loss is
below plain's + 0.01 in both; one that diverged does neither. How to run it is in `gpu_runs.py`.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from diffvision.analysis.maps import LayerMaps, open_layers
from diffvision.evaluation.language.outliers import outliers
from diffvision.models.language import LanguageConfig
from gpu_runs import Experiment, Text, run_experiment
from grid import Numbers

LONG = 4096
SINK = 0.3


def on_first(layer: LayerMaps) -> Tensor:
    """Return the share of each head's attention that the first token has, mean over queries [H]."""
    weights = layer.weights.float().abs()
    total = 1 if layer.lam is None else weights.sum(dim=-1).clamp(min=1e-9)
    return (weights[..., 0] / total).mean(dim=-1)


def measure(model: nn.Module, data: Text) -> Numbers:
    """Return the share of heads with a sink on the first token, the largest activation, and the loss of long texts."""
    windows = data.windows(data.part, torch.arange(8) * data.length, data.length)[0].long()
    first = [[on_first(layer) for layer in open_layers(model, {"tokens": window[None]})] for window in windows]
    heads = torch.stack([torch.cat(layers) for layers in first]).mean(dim=0)
    return {
        "sinks": (heads > SINK).float().mean().item(),
        "largest activation": outliers(model, windows[:4])["hidden_states/top_1"],
        "long loss": data.loss(model, min(LONG, 4 * data.length)),
    }


CURES = Experiment(
    name="sinks",
    shape=LanguageConfig(
        vocab_size=4096, dim=448, depth=8, num_heads=7, head_dim=64, mlp_dim=1195, variant="standard", max_length=LONG
    ),
    families={"plain": "standard", "V2": "v2", "gate": "gated", "sink": "sink"},
    rate_of={"gate": "plain", "sink": "plain"},
    rates=(5e-4, 1e-3, 2e-3),
    seeds=(1, 2),
    batch=32,
    length=1024,
    steps=[2000],
    tuning_steps=500,
    warmup=100,
    data=Text,
    measure=measure,
)


def cells(run: Numbers) -> list[str]:
    """Return a run's cells of the table."""
    if run["diverged"]:
        return 4 * ["diverged"]
    numbers = (run["losses"][-1], run["largest activation"], run["long loss"])
    return [f"{100 * run['sinks']:.0f}", *(f"{number:.3f}" for number in numbers)]


def report(experiment: Experiment, folder: Path) -> str:
    """Return what was measured by family and seed, and what the rule says."""
    found = experiment.done(folder)
    lines = ["| | seed | sinks, % | loss | largest activation | loss at 4,096 |", "|---|---:|---:|---:|---:|---:|"]
    for family, runs in found.items():
        for n in runs:
            lines.append(f"| {family} | {n['seed']} | {' | '.join(cells(n))} |")
    if any(len(runs) < len(experiment.seeds) for runs in found.values()):
        return "\n".join([*lines, "not all runs are done: no claim yet"])
    plain = found["plain"]
    if any(n["diverged"] or n["sinks"] < 0.1 for n in plain):
        return "\n".join([*lines, "plain diverged, or has less than 10% of heads with a sink: no claim"])
    for family, runs in list(found.items())[1:]:
        pairs = list(zip(runs, plain, strict=True))
        works = all(not n["diverged"] and n["sinks"] <= p["sinks"] / 4 for n, p in pairs)
        is_free = all(not n["diverged"] and n["losses"][-1] < p["losses"][-1] + 0.01 for n, p in pairs)
        lines.append(f"{family} {'works' if works else 'does not work'} and is {'' if is_free else 'not '}free")
    return "\n".join(lines)


if __name__ == "__main__":
    run_experiment(CURES, __doc__, report)

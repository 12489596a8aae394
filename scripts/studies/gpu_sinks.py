"""Cures where there are sinks: the attention of a gate, V2 and a learned sink on the first token, at 19 million.

Context 1,024, 32,768 tokens a step, 2,000 steps, on the text of `data/gpu_text.py`. Three learning rates are tried on
plain and on V2 by its part `rates`; the gate and the sink take plain's. Two seeds on its part `test`.

Primary: the share of heads that give the first token more than 30% of their attention, mean over queries and texts.
Then the loss, the largest activation, the loss at 4,096 tokens. Declared: only if plain has at least 10% of such heads
in both seeds. A cure works if it has at most a quarter of plain's share in both, and is free if its loss is below
plain's + 0.01 in both. How to run it is in `gpu_runs.py`.
"""

from pathlib import Path

import torch
from torch import nn

from diffvision.analysis.maps import open_layers
from diffvision.evaluation.language.outliers import outliers
from diffvision.models.language import LanguageConfig
from gpu_runs import Experiment, Text, run_experiment
from grid import Numbers

LONG = 4096
SINK = 0.3


def measure(model: nn.Module, data: Text) -> Numbers:
    """Return the share of heads with a sink on the first token, the largest activation, and the loss of long texts."""
    windows = data.windows(data.part, torch.arange(8) * data.length, data.length)[0].long()
    first = [
        [layer.weights[..., 0].float().mean(dim=-1) for layer in open_layers(model, {"tokens": window[None]})]
        for window in windows
    ]
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


def report(experiment: Experiment, folder: Path) -> str:
    """Return what was measured by family and seed, and what the rule says."""
    found = {family: [n for n in runs if not n["diverged"]] for family, runs in experiment.done(folder).items()}
    lines = ["| | seed | sinks, % | loss | largest activation | loss at 4,096 |", "|---|---:|---:|---:|---:|---:|"]
    for family, runs in found.items():
        for n in runs:
            cells = (
                n["seed"],
                f"{100 * n['sinks']:.0f}",
                *(f"{x:.3f}" for x in (n["losses"][-1], n["largest activation"], n["long loss"])),
            )
            lines.append(f"| {family} | {' | '.join(map(str, cells))} |")
    if any(len(runs) < len(experiment.seeds) for runs in found.values()):
        return "\n".join([*lines, "not all runs are done: no claim yet"])
    plain = found["plain"]
    if min(n["sinks"] for n in plain) < 0.1:
        return "\n".join([*lines, "plain has less than 10% of heads with a sink: no claim"])
    for family, runs in list(found.items())[1:]:
        pairs = list(zip(runs, plain, strict=True))
        works = all(n["sinks"] <= p["sinks"] / 4 for n, p in pairs)
        is_free = all(n["losses"][-1] < p["losses"][-1] + 0.01 for n, p in pairs)
        lines.append(f"{family} {'works' if works else 'does not work'} and is {'' if is_free else 'not '}free")
    return "\n".join(lines)


if __name__ == "__main__":
    run_experiment(CURES, __doc__, report)

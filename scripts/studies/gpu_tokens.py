"""Does V1 catch up with tokens per parameter? Losses of plain attention and V1 at 2, 15 and 100 tokens a parameter.

3.2 million parameters with embeddings, context 512, 65,536 tokens a step, up to 3.6 passes over the text, a constant
learning rate with a decay at each length; three rates by part `rates`, seeds 1 to 3 on `test`; run as in `gpu_runs.py`.

Primary: V1's test loss at 100 tokens a parameter minus plain's, paired by seed, 95% t interval. Declared: an upper
bound below 0 says "V1 pays when trained long", a lower bound above +0.02 "behind at 3M at any length"; else, or if a
run diverged, no claim.
"""

from pathlib import Path

from diffvision.models.language import LanguageConfig
from gpu_runs import Experiment, Text, run_experiment
from grid import paired_interval

TOKENS = (2, 15, 100)  # a parameter
SHAPE = LanguageConfig(
    vocab_size=4096, dim=192, depth=6, num_heads=6, head_dim=32, mlp_dim=448, variant="standard", max_length=512
)
STEP = 128 * 512
TOKENS_A_PARAMETER = Experiment(
    name="tokens",
    shape=SHAPE,
    families={"plain": "standard", "V1": "v1"},
    rates=(1e-3, 2e-3, 4e-3),
    seeds=(1, 2, 3),
    batch=128,
    length=512,
    steps=[round(tokens * 3_210_000 / STEP) for tokens in TOKENS],
    tuning_steps=735,
    warmup=50,
    data=Text,
)


def report(experiment: Experiment, folder: Path) -> str:
    """Return the losses by length, and what the rule says."""
    found = {
        family: {n["seed"]: n for n in runs if not n["diverged"]} for family, runs in experiment.done(folder).items()
    }
    seeds = sorted(found["plain"].keys() & found["V1"].keys())
    if len(seeds) < 2:
        return f"{len(seeds)} seeds of both families: no claim"
    lines = ["| tokens a parameter | plain | V1 | V1 - plain |", "|---:|---:|---:|---|"]
    for index, tokens in enumerate(TOKENS):
        losses = {family: [found[family][seed]["losses"][index] for seed in seeds] for family in found}
        mean, width, p = paired_interval([v - q for q, v in zip(*losses.values(), strict=True)])
        cells = [f"{sum(values) / len(values):.3f}" for values in losses.values()]
        lines.append(
            f"| {tokens} | {' | '.join(cells)} | {mean:+.3f} [{mean - width:+.3f}, {mean + width:+.3f}] p {p:.2g} |"
        )
    rule = "V1 pays when trained long" if mean + width < 0 else "behind at 3M at any length"
    claim = rule if mean + width < 0 or mean - width > 0.02 else "no claim"
    return "\n".join([*lines, claim if len(seeds) == len(experiment.seeds) else f"{len(seeds)} seeds: no claim"])


if __name__ == "__main__":
    run_experiment(TOKENS_A_PARAMETER, __doc__, report)

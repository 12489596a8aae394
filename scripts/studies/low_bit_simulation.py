"""Does a difference of maps amplify quantisation errors? One head, Gaussian queries and keys of equal size.

    python scripts/studies/low_bit_simulation.py

Relative errors |O' - O| / |O| of a plain head and of a differential head (lambda 0.8) whose second map's queries and
keys correlate with the first's, and the factor that `evaluate-language --tasks low_bit` reports as `cancellation`.
`bias` adds 5 to four channels of the keys, which smoothing takes out. docs/results/tables.json has the table.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from diffvision.analysis.capture import Call
from diffvision.evaluation.language.low_bit import SCHEMES, Settings

TOKENS, SIZE, VALUES = 512, 64, 128
# Standard deviation of queries and keys; that of the logits is its square.
SPREAD = 1.65
LAMBDA, BIAS, BIASED = 0.8, 5.0, 4
CASES = [(correlation, bias) for correlation in (0.0, 0.64, 0.9, 0.95) for bias in (0.0, BIAS)]
COLUMNS = ("qk_int8", "qk_int8_smooth", "logits_6", "logits_4")
GRANULARITY = Settings("head")


def draw(correlation: float, bias: float, maps: int, generator: torch.Generator) -> Call:
    """Return one causal head's queries and keys, of one or two maps, and values."""
    first, second = SPREAD * torch.randn(2, 2, TOKENS, SIZE, generator=generator)
    second = correlation * first + (1 - correlation**2) ** 0.5 * second
    q, k = torch.stack([first, second], dim=1)[:, None, None, :maps]
    k[..., :BIASED] += bias
    lam = torch.full((1, 1, 1, 1), LAMBDA) if maps == 2 else None
    values = torch.randn(1, 1, TOKENS, VALUES, generator=generator)
    return Call("head", None, q, k, values, lam, None, True, SIZE**-0.5)


def error(call: Call, scheme: str) -> float:
    """Return the relative error of the head's output under a scheme."""
    full = output(call, call.scores().applied())
    return ((output(call, SCHEMES[scheme](call, GRANULARITY).applied()) - full).norm() / full.norm()).item()


def output(call: Call, applied: Tensor) -> Tensor:
    """Return what the head gives for the map that multiplies its values."""
    return applied @ call.values(applied.dtype)


def cancellation(call: Call) -> float:
    """Return by how much the difference of two maps amplifies errors of each."""
    scores = call.scores()
    one, two = (output(call, attention) for attention in scores.maps().unbind(2))
    parts = one.square().sum() + (LAMBDA * two).square().sum()
    return (parts.sqrt() / (one - LAMBDA * two).norm()).item()


def simulate(correlation: float, bias: float, columns: Sequence[str] = COLUMNS, draws: int = 4) -> dict[str, float]:
    """Return means over draws: "plain/<scheme>" and "diff/<scheme>" of each scheme, and "cancellation"."""
    rows = []
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        heads = {"plain": draw(correlation, bias, 1, generator), "diff": draw(correlation, bias, 2, generator)}
        errors = {f"{name}/{scheme}": error(head, scheme) for name, head in heads.items() for scheme in columns}
        rows.append(errors | {"cancellation": cancellation(heads["diff"])})
    return {key: sum(row[key] for row in rows) / draws for key in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=4)
    draws = parser.parse_args().draws
    titles = [f"{name} {scheme}" for scheme in COLUMNS for name in ("plain", "diff")]
    print("| correlation | bias | " + " | ".join(titles) + " | cancellation |")
    print("|" + "---:|" * (len(titles) + 3))
    for correlation, bias in CASES:
        means = simulate(correlation, bias, draws=draws)
        cells = [f"{means[f'{name}/{scheme}']:.2g}" for scheme in COLUMNS for name in ("plain", "diff")]
        print(f"| {correlation:g} | {bias:g} | " + " | ".join(cells) + f" | {means['cancellation']:.2f} |")


if __name__ == "__main__":
    main()

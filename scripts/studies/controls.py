"""Which part of V1 does what: a Transformer with its head shape or its norm, and V1 without one part at a time.

    python scripts/studies/controls.py data --source data/text   # as scaling.py's, and the same file
    python scripts/studies/controls.py grid                      # the runs, and what they cost
    python scripts/studies/controls.py tune                      # five learning rates a family, one seed
    python scripts/studies/controls.py train                     # fresh seeds
    python scripts/studies/controls.py report --images docs/images

One size, equal parameters and tokens within 1%, a learning rate for each family; `--quick` is as scaling.py's. "V1,
lambda 0" has parameters that nothing reads: its second queries and keys.

Primary metric: the validation loss, nats a token; V1 and the two Transformers against the plain Transformer, and V1
without a part against V1. Of the trained models also, at contexts of 128 to 2,048 tokens (they were trained at 256),
of the last 64 queries of a row: the entropy of what multiplies the values, as a share of the most it can have; the
largest logit of a query; and the answer mass of the best head where random tokens are repeated: the share of the
token that followed the first time (induction heads, Olsson et al. 2022).
"""

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diffvision.analysis.capture import Call, Scores, captured
from diffvision.analysis.figures.style import COLOURS, legend_below, new_figure, styled
from diffvision.analysis.statistics import relative_entropy, shares
from diffvision.models.language import LanguageModel
from diffvision.models.modes import evaluating
from diffvision.nn import ATTENTION, DiffAttention
from grid import differences, spread
from language_grid import HEAD_DIM, RESULTS, Family, Study, describe, rate_table, run_study
from small_language import VOCABULARY, Data

LENGTHS = (128, 256, 512, 1024, 2048)
METRICS = ("entropy", "largest logit", "answer mass")
TOKENS, QUERIES = 8192, 64  # read at every length; the last ones of a row


class WithoutDifference(DiffAttention):
    """V1 with a lambda of zero: one map a head, values twice as wide, the norm and the factor."""

    variant = "v1_without_difference"

    def compute_lambda(self, x: Tensor | None = None) -> Tensor:
        """Return zero [1]."""
        return self.lambda_q1.new_zeros(1)


class FreeLambda(DiffAttention):
    """V1 with lambda itself as a parameter, one scalar a layer from `lambda_init`, in place of the exponentials."""

    variant = "v1_free"

    def add_parameters(self, dim: int, factory_kwargs: dict[str, Any]) -> None:
        # V1's vectors are drawn and dropped, so that one seed gives both the same other weights.
        super().add_parameters(dim, factory_kwargs)
        super().reset_parameters()
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            delattr(self, name)
        self.lambda_scalar = nn.Parameter(torch.empty(1, **factory_kwargs))

    def reset_parameters(self) -> None:
        """Set the scalar to `lambda_init`."""
        nn.init.constant_(self.lambda_scalar, self.lambda_init)

    def compute_lambda(self, x: Tensor | None = None) -> Tensor:
        """Return the scalar [1]."""
        return self.lambda_scalar.float()


class WithoutFactor(DiffAttention):
    """V1 whose heads are not multiplied by 1 - `lambda_init`."""

    variant = "v1_without_factor"

    output_factor = 1.0

    def finish(self, heads: Tensor, factor: float | None = None) -> Tensor:
        return super().finish(heads, 1.0 if factor is None else factor)


ATTENTION.update({layer.variant: layer for layer in (WithoutDifference, FreeLambda, WithoutFactor)})
FAMILIES = {
    "plain": Family("standard"),
    "plain, V1's heads": Family("standard", heads=0.5, head_dim=2 * HEAD_DIM),
    "plain, head norm": Family("standard", head_norm=True),
    "V1": Family("v1", heads=0.5),
    "V1, lambda 0": Family("v1_without_difference", heads=0.5),
    "V1, free lambda": Family("v1_free", heads=0.5),
    "V1, no norm": Family("v1", heads=0.5, head_norm=False),
    "V1, no factor": Family("v1_without_factor", heads=0.5),
}
CONTRASTS = {  # against -> what is compared with it
    "plain": ("plain, V1's heads", "plain, head norm", "V1"),
    "V1": ("V1, lambda 0", "V1, free lambda", "V1, no norm", "V1, no factor"),
}
STUDY = Study(
    results=RESULTS / "controls",
    families=FAMILIES,
    sizes=("0.1M",),
    tuned_sizes=("0.1M",),
    budgets=(1e12,),
    tuned_budget=1e12,
)


def measure(model: LanguageModel, data: Data) -> dict[str, Any]:
    """Return by context length what attention does, and each layer's lambda."""
    layers = [block.attn for block in model.blocks]
    lambdas = [round(layer.compute_lambda().item(), 3) for layer in layers if isinstance(layer, DiffAttention)]
    return {"contexts": {length: at_length(model, data, length) for length in LENGTHS}, "lambda": lambdas}


def at_length(model: LanguageModel, data: Data, length: int) -> dict[str, float]:
    """Return the entropy, the largest logit and the answer mass at a context length."""
    text = data.validation[:TOKENS].long()
    generator = torch.Generator().manual_seed(0)
    half = torch.randint(1, VOCABULARY, (len(text) // length, length // 2), generator=generator)
    entropies, logits, masses = [], [], []

    def see(call: Call) -> Scores:
        scores = call.scores()
        entropies.append(relative_entropy(scores.applied()[..., -QUERIES:, :], causal=True).mean())
        allowed = scores.logits.masked_fill(~scores.allowed, -torch.inf)
        logits.append(allowed[..., -QUERIES:, :].amax(-1).mean())
        return scores

    def see_answer(call: Call) -> Scores:
        scores = call.scores()
        # The last token has no answer to find before it.
        queries = torch.arange(length - QUERIES - 1, length - 1)
        answers = (queries - length // 2 + 1).view(1, 1, -1, 1).expand(*scores.logits.shape[:2], -1, 1)
        found = shares(scores.applied()[..., queries, :]).gather(-1, answers)
        masses.append(found.mean(dim=(0, 2, 3)))
        return scores

    with evaluating(model):
        with captured(model, see):
            for row in text[: len(text) // length * length].view(-1, 1, length):
                model(row)
        with captured(model, see_answer):
            for row in torch.cat([half, half], dim=1).split(1):
                model(row)
    by_head = torch.cat([torch.stack(masses[layer :: len(model.blocks)]).mean(0) for layer in range(len(model.blocks))])
    means = {"entropy": torch.stack(entropies).mean(), "largest logit": torch.stack(logits).mean()}
    return {name: round(value.item(), 4) for name, value in (means | {"answer mass": by_head.max()}).items()}


def trained(study: Study) -> dict[str, dict[int, dict[str, Any]]]:
    """Return by family and seed what the runs measured, but for those that diverged."""
    runs: dict[str, dict[int, dict[str, Any]]] = {family: {} for family in study.families}
    for numbers in study.trained():
        runs[numbers["family"]][numbers["seed"]] = numbers
    return runs


def losses_of(study: Study) -> dict[str, dict[int, float]]:
    """Return the validation loss at the end by family and seed."""
    return {
        family: {seed: one["points"][-1]["loss"] for seed, one in by_seed.items()}
        for family, by_seed in trained(study).items()
    }


def loss_table(study: Study) -> Iterator[str]:
    """Yield a table of losses, of differences, and of lambda by layer."""
    runs, losses = trained(study), losses_of(study)
    rows = compared(losses)
    yield "| | tokens | FLOPs of a step | loss | difference | largest gradient norm | lambda by layer |"
    yield "|---|---:|---:|---:|---|---:|---|"
    for family, by_seed in runs.items():
        if done := list(by_seed.values()):
            norm = spread([one["largest gradient norm"] for one in done])
            lambdas = [f"{statistics.mean(layer):.2f}" for layer in zip(*(one["lambda"] for one in done), strict=True)]
            cost = f"{done[0]['points'][-1]['tokens']:,} | {done[0]['FLOPs of a step']:.3g}"
            loss = spread(list(losses[family].values()), 3)
            yield f"| {family} | {cost} | {loss} | {rows.get(family, '')} | {norm} | {' '.join(lambdas)} |"


def compared(losses: Mapping[str, dict[int, float]]) -> dict[str, str]:
    """Return each family's difference to what it is compared with, corrected within each of the two groups."""
    rows = {}
    for against, others in CONTRASTS.items():
        group = differences({family: losses[family] for family in (against, *others)})
        rows |= {family: f"from {against} {difference.text(3)}" for family, difference in group.items()}
    return rows


def context_table(study: Study, metric: str) -> Iterator[str]:
    """Yield a table of a metric by context length."""
    lengths = list(map(str, LENGTHS))
    yield f"| {metric} at a context of | {' | '.join(lengths)} |"
    yield "|---|" + "---:|" * len(lengths)
    for family, runs in trained(study).items():
        cells = [spread([one["contexts"][length][metric] for one in runs.values()], 3) for length in lengths]
        yield f"| {family} | {' | '.join(cells)} |"


def report(study: Study) -> None:
    """Print the tables, in Markdown."""
    print(describe(study), end="\n\n")
    print("\n".join(rate_table(study)), end="\n\n")
    print("\n".join(loss_table(study)), end="\n\n")
    for metric in METRICS:
        print("\n".join(context_table(study, metric)), end="\n\n")


@styled
def draw(study: Study) -> Any:
    """Return a figure: what attention does over the context length; means over seeds, with their deviations."""
    figure = new_figure(4.6, 2.7 * len(METRICS))  # one column: a phone shows 4.6 inches at about their size
    axes = figure.subplots(len(METRICS), 1)
    by_family = trained(study)
    for ax, metric in zip(axes, METRICS, strict=True):
        for number, (family, runs) in enumerate(by_family.items()):
            values = [[one["contexts"][str(length)][metric] for one in runs.values()] for length in LENGTHS]
            means = [statistics.mean(column) for column in values]
            bars = [statistics.stdev(column) if len(column) > 1 else 0 for column in values]
            style = {"color": COLOURS[number % len(COLOURS)], "linestyle": "-" if number < 4 else "--"}
            ax.errorbar(LENGTHS, means, bars, label=family, linewidth=1.2, capsize=2, **style)
        ax.axvline(256, color="grey", linewidth=0.8, linestyle=":")
        ax.set(title=metric, xscale="log", xticks=LENGTHS, xticklabels=LENGTHS)
        ax.minorticks_off()
    axes[-1].set_xlabel("context, tokens")
    return legend_below(figure, axes[0], columns=2)


if __name__ == "__main__":
    run_study(STUDY, __doc__, report, draw, measure)

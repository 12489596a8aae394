"""Which part of V1 does what: a Transformer with its head shape or its norm, and V1 without one part at a time.

    python scripts/studies/controls.py data --source data/text   # as scaling.py's, and the same file
    python scripts/studies/controls.py grid                      # the runs, and what they cost
    python scripts/studies/controls.py tune                      # four learning rates a family, one seed
    python scripts/studies/controls.py train                     # fresh seeds
    python scripts/studies/controls.py report --images docs/images

One size, equal parameters and tokens within 1%, a learning rate for each family; `--quick` is as scaling.py's.

Primary metric: the validation loss, nats a token. Of the trained models also, at contexts of 128 to 2,048 tokens (they
were trained at 256): the entropy of a row's weights as a share of the most it can have, and the largest attention
logit and hidden state.
"""

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from diffvision.analysis.capture import Call, Scores, captured
from diffvision.analysis.figures.style import colours_of, legend_below, panels, styled
from diffvision.analysis.statistics import relative_entropy
from diffvision.evaluation.language.outliers import outliers
from diffvision.models.language import LanguageModel
from diffvision.models.modes import evaluating
from diffvision.nn import ATTENTION, DiffAttention, HeadNorm
from grid import differences, spread
from scaling import HEAD_DIM, RESULTS, Family, Study, describe, rate_table, run_study
from small_language import Data

LENGTHS = (128, 256, 512, 1024, 2048)
ROWS, QUERIES = 4, 64  # of the validation text; the last ones of a row


class WithoutDifference(DiffAttention):
    """V1 with a lambda of zero: one map a head, values twice as wide, the norm and the factor."""

    variant = "v1_without_difference"

    def compute_lambda(self, x: Tensor | None = None) -> Tensor:
        """Return zero [1]."""
        return self.lambda_q1.new_zeros(1)


class FreeLambda(DiffAttention):
    """V1 with one scalar a layer for lambda, of any sign, from `lambda_init`."""

    variant = "v1_free"

    def _add_lambda(self, dim: int, made: dict[str, Any]) -> None:
        self.lambda_scalar = nn.Parameter(torch.empty(1, **made))

    def reset_parameters(self) -> None:
        """Set the scalar to `lambda_init`."""
        nn.init.constant_(self.lambda_scalar, self.lambda_init)

    def compute_lambda(self, x: Tensor | None = None) -> Tensor:
        """Return the scalar [1]."""
        return self.lambda_scalar.float()


class WithoutFactor(DiffAttention):
    """V1 whose heads are not multiplied by 1 - `lambda_init`."""

    variant = "v1_without_factor"

    def _finish(self, heads: Tensor) -> Tensor:
        return self.head_norm(heads) if isinstance(self.head_norm, HeadNorm) else heads


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
STUDY = Study(
    results=RESULTS / "controls",
    families=FAMILIES,
    sizes=("0.1M",),
    tuned_sizes=("0.1M",),
    budgets=(1e12,),
    tuned_budget=1e12,
)


def measure(model: LanguageModel, data: Data) -> dict[str, Any]:
    """Return by context length the entropy of rows and the largest logit and hidden state; and each layer's lambda."""
    by_length = {}
    for length in LENGTHS:
        count = min(ROWS, len(data.validation) // length)
        rows = data.validation[: count * length].view(count, length).long()
        largest = outliers(model, rows, top=(1,))
        by_length[length] = {
            "entropy": round(entropy(model, rows), 4),
            "largest logit": round(largest["attention_logits/top_1"], 2),
            "largest hidden state": round(largest["hidden_states/top_1"], 2),
        }
    layers = [block.attn for block in model.blocks]
    lambdas = [round(layer.compute_lambda().item(), 3) for layer in layers if isinstance(layer, DiffAttention)]
    return {"contexts": by_length, "lambda": lambdas}


def entropy(model: LanguageModel, rows: Tensor) -> float:
    """Return the mean relative entropy of the last queries' rows over layers, heads and rows [S, N] of tokens."""
    found: list[Tensor] = []

    def see(call: Call) -> Scores:
        scores = call.scores()
        found.append(relative_entropy(scores.applied()[..., -QUERIES:, :], causal=True).flatten())
        return scores

    with evaluating(model), captured(model, see):
        for row in rows.split(1):
            model(row)
    return torch.cat(found).mean().item()


def trained(study: Study, family: str) -> dict[int, dict[str, Any]]:
    """Return by seed what a family's runs measured, but for those that diverged."""
    runs = {run.seed: study.numbers(run) for run in study.confirming() if run.family == family}
    return {seed: numbers for seed, numbers in runs.items() if numbers and not numbers["diverged"]}


def loss_table(study: Study) -> Iterator[str]:
    """Yield a table of losses, of differences to the plain model, and of lambda by layer."""
    losses = {
        family: {seed: numbers["points"][-1]["loss"] for seed, numbers in trained(study, family).items()}
        for family in study.families
    }
    rows = differences(losses)
    yield "| | loss | from plain | largest gradient norm | lambda by layer |"
    yield "|---|---:|---|---:|---|"
    for family in study.families:
        runs = list(trained(study, family).values())
        norm = spread([run["largest gradient norm"] for run in runs])
        lambdas = [f"{statistics.mean(layer):.2f}" for layer in zip(*(run["lambda"] for run in runs), strict=True)]
        difference = rows[family].text(3) if family in rows else ""
        yield f"| {family} | {spread(list(losses[family].values()), 3)} | {difference} | {norm} | {' '.join(lambdas)} |"


def context_table(study: Study, metric: str, digits: int) -> Iterator[str]:
    """Yield a table of a metric by context length."""
    lengths = list(map(str, LENGTHS))
    yield f"| {metric} at a context of | {' | '.join(lengths)} |"
    yield "|---|" + "---:|" * len(lengths)
    for family in study.families:
        runs = list(trained(study, family).values())
        cells = [spread([run["contexts"][length][metric] for run in runs], digits) for length in lengths]
        yield f"| {family} | {' | '.join(cells)} |"


def report(study: Study) -> None:
    """Print the tables, in Markdown."""
    print(describe(study), end="\n\n")
    print("\n".join(rate_table(study)), end="\n\n")
    print("\n".join(loss_table(study)), end="\n\n")
    for metric, digits in (("entropy", 3), ("largest logit", 1), ("largest hidden state", 1)):
        print("\n".join(context_table(study, metric, digits)), end="\n\n")


@styled
def draw(study: Study) -> Any:
    """Return a figure: entropy and outliers over the context length; means over seeds, with their deviations."""
    figure, axes = panels(3, width=3.2, height=3.6)
    colours = colours_of(study.families)
    for ax, metric in zip(axes, ("entropy", "largest logit", "largest hidden state"), strict=True):
        for number, (family, colour) in enumerate(colours.items()):
            runs = list(trained(study, family).values())
            values = [[run["contexts"][str(length)][metric] for run in runs] for length in LENGTHS]
            means = [statistics.mean(column) for column in values]
            bars = [statistics.stdev(column) if len(column) > 1 else 0 for column in values]
            line = "-" if number < 4 else "--"
            ax.errorbar(LENGTHS, means, bars, color=colour, label=family, linestyle=line, linewidth=1.2, capsize=2)
        ax.axvline(256, color="grey", linewidth=0.8, linestyle=":")
        ax.set(title=metric, xlabel="context, tokens", xscale="log", xticks=LENGTHS, xticklabels=LENGTHS)
        ax.minorticks_off()
    return legend_below(figure, axes[0])


if __name__ == "__main__":
    run_study(STUDY, __doc__, report, draw, measure)

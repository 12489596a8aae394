"""Retrieval in long noise: plain attention, V1, V2 and a gate, trained at 2,048 tokens and tested up to 16,384.

Tokens are drawn on the device. A window is noise with pairs of a key and its value in it, each behind a mark. At its
end the keys come again, and the value after a key is to be predicted: 512 questions in training, in a test one a pair.
Half of the windows have 4 pairs (needles), half 64 (associative recall). Other keys with values, without a mark,
distract. 27 million parameters, two seeds; three learning rates for each family on a shorter run.

Primary: accuracy on needles at the longest length at which any family exceeds 50% in both seeds. Declared: a family
holds longer than plain there if its lower seed is above plain's higher one by 5 points or more; else no claim. A
run that diverged has 0%. This is the paper's own claim at the size that fits. How to run it is in `gpu_runs.py`.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from diffvision.models.language import LanguageConfig
from gpu_runs import Experiment, loss_of, run_experiment
from grid import Numbers

MARK, KEYS, VALUES, VOCABULARY = 0, 128, 128, 4096  # ids: the mark, then keys, then values, then noise
PAIRS = (4, 64)
LENGTHS = (2048, 4096, 8192, 16_384)


class Noise:
    """Windows drawn on the device by a seed."""

    def __init__(self, file: Path | None, experiment: Experiment, part: str, device: torch.device) -> None:
        self.batch, self.length, self.device = experiment.batch, experiment.length, device
        self.tested = 8 * experiment.batch  # windows of a length
        self.seed = 10_000 if part == "rates" else 20_000

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Yield batches [2, B, N], without end."""
        generator = torch.Generator(self.device).manual_seed(seed)
        half = self.batch // 2
        while True:
            parts = [self.draw(half, self.length, pairs, generator, self.length // 4) for pairs in self.pairs()]
            yield torch.cat(parts, dim=1)

    def pairs(self) -> list[int]:
        """Return the numbers of pairs that fit a quarter of a window."""
        return [min(pairs, self.length // 16) for pairs in PAIRS]

    def draw(self, count: int, length: int, pairs: int, generator: torch.Generator, questions: int = 0) -> Tensor:
        """Return inputs and targets [2, count, length]; each pair is asked for equally often, by default once."""

        def distinct(high: int, size: int) -> Tensor:
            return torch.rand(count, high, generator=generator, device=self.device).argsort(dim=1)[:, :size]

        def below(high: int, *size: int) -> Tensor:
            return torch.randint(high, size, generator=generator, device=self.device)

        turns = max(1, questions // pairs)
        context = length + 1 - 2 * turns * pairs
        tokens = 1 + KEYS + VALUES + below(VOCABULARY - 1 - KEYS - VALUES, count, length + 1)
        keys = 1 + distinct(KEYS, 2 * pairs)
        values = 1 + KEYS + below(VALUES, count, 2 * pairs)
        starts = 3 * distinct(context // 3, 2 * pairs)  # the first half of the pairs has a mark, the second distracts
        tokens.scatter_(1, starts[:, :pairs], MARK)
        tokens.scatter_(1, starts + 1, keys)
        tokens.scatter_(1, starts + 2, values)
        asked = torch.cat([distinct(pairs, pairs) for _ in range(turns)], dim=1)
        keys, values = keys[:, :pairs].gather(1, asked), values[:, :pairs].gather(1, asked)
        tokens[:, context:] = torch.stack([keys, values], dim=2).flatten(1)
        targets = torch.full_like(tokens[:, 1:], -100)
        targets[:, context::2] = values
        return torch.stack([tokens[:, :-1], targets]).to(torch.int16)

    def loss(self, model: nn.Module) -> float:
        """Return the loss on fixed windows of the training length."""
        generator = torch.Generator(self.device).manual_seed(self.seed)
        windows = [self.draw(8, self.length, pairs, generator) for pairs in self.pairs()]
        with torch.no_grad():
            return sum(loss_of(model, batch).item() for batch in windows) / len(windows)

    @torch.no_grad()
    def accuracy(self, model: nn.Module, length: int, pairs: int) -> float:
        """Return the share of answers that are right in fixed windows of a length."""
        generator = torch.Generator(self.device).manual_seed(self.seed + length)
        right = total = 0
        for _ in range(self.tested // 8):
            inputs, targets = self.draw(8, length, pairs, generator).long()
            with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.is_cuda):
                found = model(inputs).argmax(dim=-1)
            asked = targets >= 0
            right += int((found == targets)[asked].sum())
            total += int(asked.sum())
        return right / total


def tested(trained: int) -> list[int]:
    """Return the lengths that are tested after training at a length."""
    return [trained * length // LENGTHS[0] for length in LENGTHS]


def measure(model: nn.Module, data: Noise) -> Numbers:
    """Return the accuracy by length, on needles and on recall."""
    return {
        kind: {length: data.accuracy(model, length, pairs) for length in tested(data.length)}
        for kind, pairs in zip(("needles", "recall"), data.pairs(), strict=True)
    }


NOISE = Experiment(
    name="noise",
    shape=LanguageConfig(
        vocab_size=VOCABULARY,
        dim=512,
        depth=8,
        num_heads=8,
        head_dim=64,
        mlp_dim=1365,
        variant="standard",
        max_length=LENGTHS[-1],
    ),
    families={"plain": "standard", "V1": "v1", "V2": "v2", "gate": "gated"},
    rates=(3e-4, 6e-4, 1.2e-3),
    seeds=(1, 2),
    batch=16,
    length=LENGTHS[0],
    steps=[1200],
    tuning_steps=400,
    warmup=100,
    data=Noise,
    measure=measure,
)


def report(experiment: Experiment, folder: Path) -> str:
    """Return the accuracies by family, seed and length, and what the rule says."""
    found = experiment.done(folder)
    if any(len(runs) < len(experiment.seeds) for runs in found.values()):
        return "not all runs are done: no claim yet"
    lengths = [str(length) for length in tested(experiment.length)]
    for n in (n for runs in found.values() for n in runs if n["diverged"]):
        n |= dict.fromkeys(("needles", "recall"), dict.fromkeys(lengths, 0))
    lines = [f"| | seed | task | {' | '.join(lengths)} |", "|---|---:|---|" + "---:|" * len(lengths)]
    for family, runs in found.items():
        for n in runs:
            for kind in ("needles", "recall"):
                cells = " | ".join(f"{100 * n[kind][length]:.0f}" for length in lengths)
                lines.append(f"| {family} | {n['seed']} | {kind} | {cells} |")
    lowest = {f: {length: min(n["needles"][length] for n in runs) for length in lengths} for f, runs in found.items()}
    reached = [length for length in lengths if max(of[length] for of in lowest.values()) > 0.5]
    if not reached:
        return "\n".join([*lines, "no family exceeds 50% at any length: no claim"])
    plain = max(n["needles"][reached[-1]] for n in found["plain"])
    holds = [family for family, of in lowest.items() if family != "plain" and of[reached[-1]] >= plain + 0.05]
    claim = f"longer than plain at {reached[-1]}: {', '.join(holds)}" if holds else f"at {reached[-1]}: no claim"
    return "\n".join([*lines, claim])


if __name__ == "__main__":
    run_experiment(NOISE, __doc__, report)

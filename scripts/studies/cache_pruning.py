"""Small models for `evaluate-language --tasks cache_pruning`, of text that can only be continued from its context.

    python scripts/studies/cache_pruning.py --output runs/cache_pruning --tune
    python scripts/studies/cache_pruning.py --output runs/cache_pruning --seeds 3
    diffvision evaluate-language runs/cache_pruning/{plain,V1,V2}-{0,1,2} --tasks cache_pruning --output results ...
    python scripts/studies/cache_pruning.py --report results/cache_pruning.json

The text is `diffvision data make recall`'s: numbers of cities to be found again, words with made-up names. A
Transformer, V1 and V2 of equal parameters are trained alike with each seed, and each is saved to a folder NAME-SEED
with its tokenizer, next to validation.jsonl, longer documents of another seed. The text and its tokenizer are the same
for all seeds; a seed draws the weights and the order of the windows. The report has means over seeds, and what one
method has more than another, paired by seed.
"""

import argparse
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from diffvision.data.datasets.needle_documents import training_documents
from diffvision.data.datasets.recall import recall_documents
from diffvision.data.text.tokenizers import Tokenizer, train_tokenizer
from diffvision.models import language
from grid import paired_interval
from language_grid import FAMILIES, WARMUP
from seeds import Models, by_seed, means_of
from small_language import BATCH, LENGTH, VALIDATION_TOKENS, Data, fit

SIZE, VOCABULARY, WORDS, VALIDATION_SEED = "0.1M", 1024, 140, 1_000_000
TRIED, TUNING_SEED = (1e-3, 2e-3, 4e-3, 8e-3), 100
RATES = {"plain": 2e-3, "V1": 2e-3, "V2": 2e-3}  # of the tried ones, that with the lowest loss: `--tune`
LONG, NEEDLES = 300, 6  # words and facts of a validation document
RATIOS = ("0.5", "0.75", "0.9")  # of the tables
CONTRASTS = (
    ("diff", "map1"),
    ("diff", "sum"),
    ("diff", "snap"),
    ("diff_value", "diff"),
    ("diff_value", "snap_value"),
    ("snap_value", "snap"),
)
KINDS = {"nll_rise": "loss", "needle_agnostic": "later", "needle_aware": "before"}


def stream(tokenizer: Tokenizer, tokens: int, seed: int) -> torch.Tensor:
    """Return so many tokens of documents with needles, each document ended by its token."""
    ids: list[int] = []
    for text in recall_documents(tokens // 8, WORDS, seed):
        ids += [*tokenizer.encode(text), tokenizer.eos_id]
        if len(ids) >= tokens:
            break
    return torch.tensor(ids[:tokens], dtype=torch.int16)


def make_data(output: Path, tokens: int) -> Data:
    """Write the tokenizer, the tokens and the validation text, and return them."""
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(recall_documents(4000, WORDS, 0), VOCABULARY)
    tokenizer.save(output / "tokenizer.json")
    validation = stream(tokenizer, VALIDATION_TOKENS + 1, VALIDATION_SEED)
    torch.save({"train": stream(tokenizer, tokens + 1, 0), "validation": validation}, output / "data.pt")
    # Longer than a window, so that what is behind a prompt asks for what is in it.
    texts = training_documents(count=60, lengths=(LONG, LONG), most_needles=NEEDLES, seed=VALIDATION_SEED)
    (output / "validation.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Data(output / "data.pt")


def rows_of(cells: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield a table's lines, its head first; the first column is text."""
    for index, row in enumerate(cells):
        yield f"| {' | '.join(map(str, row))} |"
        if not index:
            yield "|---|" + "---:|" * (len(row) - 1)


def sparsity_rows(models: Mapping[str, Mapping[str, float]]) -> Iterator[list[object]]:
    """Yield k95 and Gini by layer and length."""
    keys = [key.split("/") for metrics in models.values() for key in metrics if key.startswith("k95/")]
    lengths = sorted({int(length) for _, _, length in keys})
    yield ["model, layer", *(f"k95 of {length}" for length in lengths), *(f"Gini of {length}" for length in lengths)]
    for name, metrics in models.items():
        for layer in sorted({layer for _, layer, _ in keys}):
            k95 = [f"{metrics[f'k95/{layer}/{length}']:.1f}" for length in lengths]
            yield [f"{name}, {layer}", *k95, *(f"{metrics[f'gini/{layer}/{length}']:.3f}" for length in lengths)]


def method_rows(metrics: Mapping[str, float]) -> Iterator[list[object]]:
    """Yield the rise of the loss, and % of needles, by method and ratio."""
    yield ["method", *(f"{title}, {ratio}" for title in KINDS.values() for ratio in RATIOS), "within 1%"]
    for method in (key.split("/")[1] for key in metrics if key.startswith("largest_ratio/")):
        values = {kind: [metrics[f"{kind}/{method}/{ratio}"] for ratio in RATIOS] for kind in KINDS}
        needles = [f"{100 * value:.0f}" for kind in list(KINDS)[1:] for value in values[kind]]
        largest = f"{metrics[f'largest_ratio/{method}']:.2f}"
        yield [method, *(f"{value:+.3f}" for value in values["nll_rise"]), *needles, largest]


def contrast_rows(models: Models) -> Iterator[list[object]]:
    """Yield what a method has more than another in the same models, with the 95% t interval over seeds."""
    yield ["model, methods", *(f"{title}, {ratio}" for title in KINDS.values() for ratio in RATIOS)]
    for name, metrics in means_of(models).items():
        for method, other in CONTRASTS:
            if f"largest_ratio/{method}" in metrics:
                yield [f"{name}, {method} − {other}", *contrasts(models, name, method, other)]


def contrasts(models: Models, name: str, method: str, other: str) -> Iterator[str]:
    """Yield what a method has more than another by loss (nats) and needles (points), and ratio."""
    for kind, ratio in itertools.product(KINDS, RATIOS):
        values, others = (by_seed(models, f"{kind}/{one}/{ratio}")[name] for one in (method, other))
        scale, digits = (1, 3) if kind == "nll_rise" else (100, 0)
        mean, half, _ = paired_interval(
            [scale * (values[seed] - others[seed]) for seed in values.keys() & others.keys()]
        )
        yield f"{mean:+.{digits}f} [{mean - half:+.{digits}f}, {mean + half:+.{digits}f}]"


def report(models: Models) -> None:
    """Print the tables of what `evaluate-language --tasks cache_pruning` wrote."""
    means = means_of(models)
    print("\n".join(rows_of(sparsity_rows(means))))
    for name, metrics in means.items():
        later, before = (f"{100 * metrics[f'needle_{mode}/full']:.0f}%" for mode in ("agnostic", "aware"))
        print(f"\n{name}: loss {metrics['nll/full']:.3f}, needles {later} (later), {before} (before)\n")
        print("\n".join(rows_of(method_rows(metrics))))
    if all(len(of) > 1 for of in by_seed(models, "nll/full").values()):
        print("\n" + "\n".join(rows_of(contrast_rows(models))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/cache_pruning"))
    parser.add_argument("--tokens", type=int, default=1_500_000)
    parser.add_argument("--seeds", type=int, default=1, help="how many, from 0")
    parser.add_argument("--tune", action="store_true", help="print the loss by learning rate instead, of another seed")
    parser.add_argument("--report", type=Path, help="print the tables of a cache_pruning.json instead")
    options = parser.parse_args()
    if options.report:
        report(json.loads(options.report.read_text())["models"])
        return
    torch.set_num_threads(1)
    data = make_data(options.output, options.tokens)
    steps = options.tokens // (BATCH * LENGTH)
    settings = {"warmup": round(WARMUP * steps), "lengths": [steps]}
    if options.tune:
        for rate, (name, family) in itertools.product(TRIED, FAMILIES.items()):
            torch.manual_seed(TUNING_SEED)
            trained = fit(family.create(SIZE), data, rate=rate, seed=TUNING_SEED, **settings)
            print(f"{name} at {rate:g}: {trained.branches[0].loss:.3f} nats a token", flush=True)
        return
    for seed, (name, family) in itertools.product(range(options.seeds), FAMILIES.items()):
        folder = options.output / f"{name}-{seed}"
        if folder.exists():
            continue
        torch.manual_seed(seed)
        model = family.create(SIZE)
        trained = fit(model, data, rate=RATES[name], seed=seed, **settings)
        language.save(model, folder, options.output / "tokenizer.json")
        print(f"{folder.name}: {trained.branches[0].loss:.3f} nats a token, {trained.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()

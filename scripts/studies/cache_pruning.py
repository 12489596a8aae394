"""Small models for `evaluate-language --tasks cache_pruning`, of text that can only be continued from its context.

    python scripts/studies/cache_pruning.py --output runs/cache_pruning

The text is `diffvision data make recall`'s: numbers of cities to be found again, words with made-up names. A
Transformer, V1 and V2 of equal parameters are trained alike, and each is saved to a folder with its tokenizer, next to
validation.txt, which is documents of another seed. One seed says what pruning does to a model, and nothing of families.
"""

import argparse
from pathlib import Path

import torch

from diffvision.data.made.recall import recall_documents
from diffvision.data.text.tokenizers import Tokenizer, train_tokenizer
from diffvision.models import language
from language_grid import FAMILIES, WARMUP
from small_language import BATCH, LENGTH, VALIDATION_TOKENS, Data, fit

SIZE, RATE, VOCABULARY, WORDS, VALIDATION_SEED = "0.1M", 4e-3, 1024, 140, 1_000_000


def stream(tokenizer: Tokenizer, tokens: int, seed: int) -> torch.Tensor:
    """Return so many tokens of documents with needles, each document ended by its token."""
    ids: list[int] = []
    for text in recall_documents(tokens // 8, WORDS, seed):
        ids += [*tokenizer.encode(text), tokenizer.eos_id]
        if len(ids) >= tokens:
            break
    return torch.tensor(ids[:tokens], dtype=torch.int16)


def make_data(output: Path, tokens: int, seed: int) -> Data:
    """Write the tokenizer, the tokens and the validation text, and return them."""
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(recall_documents(4000, WORDS, seed), VOCABULARY)
    tokenizer.save(output / "tokenizer.json")
    validation = stream(tokenizer, VALIDATION_TOKENS + 1, VALIDATION_SEED)
    torch.save({"train": stream(tokenizer, tokens + 1, seed), "validation": validation}, output / "data.pt")
    (output / "validation.txt").write_text("\n".join(recall_documents(1000, WORDS, VALIDATION_SEED)))
    return Data(output / "data.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/cache_pruning"))
    parser.add_argument("--tokens", type=int, default=1_500_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = make_data(options.output, options.tokens, options.seed)
    steps = options.tokens // (BATCH * LENGTH)
    for name, family in FAMILIES.items():
        torch.manual_seed(options.seed)
        model = family.create(SIZE)
        trained = fit(model, data, rate=RATE, warmup=round(WARMUP * steps), lengths=[steps], seed=options.seed)
        language.save(model, options.output / name, options.output / "tokenizer.json")
        print(f"{name}: {trained.branches[0].loss:.3f} nats a token, {trained.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()

"""`diffvision generate`: text from a checkpoint, printed as it is made."""

import sys
from pathlib import Path

import torch

from diffvision.data.text.tokenizers import Tokenizer, load_tokenizer
from diffvision.evaluation.distributed import found_device
from diffvision.models import language
from diffvision.models.language.generation import generate


def generate_text(
    checkpoint: str,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    tokenizer: str | None = None,
    device: str = "auto",
    compile: bool = False,
) -> str:
    """Continues a prompt with a language model, and prints the text as it is made, up to the end of the document.

    Args:
        checkpoint: directory of a saved language model, or a checkpoint of our training (.ckpt).
        prompt: text to continue.
        max_new_tokens: most tokens to make.
        temperature: 0 takes the likeliest token each time; 1 draws from the model's own distribution.
        top_k: draw among the k likeliest tokens only.
        top_p: draw among the likeliest tokens that together reach this probability.
        seed: the same seed gives the same text on the same machine; -2**63 to 2**64 - 1.
        tokenizer: tokenizer.json, a directory that holds one, or a name of tiktoken's; by default the one beside the
            checkpoint, or the one of its training.
        device: auto (cuda where there is one), cpu, cuda, cuda:1, ...
        compile: compile the decoding step; pays for long texts.

    Returns:
        The continuation.

    Raises:
        ValueError: an empty prompt, one too long for the model, a tokenizer that is not the checkpoint's, or a setting
            out of its range. FileNotFoundError: no checkpoint, or no tokenizer.
    """
    if not prompt:
        raise ValueError("the prompt is empty: give some text to continue")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed is {seed}: it must be -2**63 to 2**64 - 1, as torch's generators take it")
    device = found_device(device)
    model = language.load(checkpoint, device)
    words = load_tokenizer(tokenizer or _beside(checkpoint))
    if words.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has a vocabulary of {words.vocab_size} and the checkpoint {checkpoint} one of "
            f"{model.config.vocab_size}: give the tokenizer that it was trained with"
        )
    shown = _Shown(words, prompt)
    generate(
        model,
        [words.encode(prompt)],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop={words.eos_id},
        vocab_size=words.vocab_size,
        generator=torch.Generator(device).manual_seed(seed),
        on_token=lambda _, token: shown.add(token),
        compile=compile,
    )
    return shown.end()


class _Shown:
    """Prints a prompt and the text of tokens as they come, but a character only when all of its bytes are there."""

    def __init__(self, tokenizer: Tokenizer, prompt: str) -> None:
        self.tokenizer, self.prompt, self.tokens, self.printed = tokenizer, prompt, list[int](), 0

    def add(self, token: int) -> None:
        self.tokens.append(token)
        text = self.prompt + self.tokenizer.decode(self.tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._print(text)

    def end(self) -> str:
        """Prints what is left, and returns the tokens' text."""
        text = self.tokenizer.decode(self.tokens)
        self._print(f"{self.prompt}{text}\n")
        return text

    def _print(self, text: str) -> None:
        sys.stdout.write(text[self.printed :])
        sys.stdout.flush()
        self.printed = len(text)


def _beside(checkpoint: str) -> Path:
    found = language.find_tokenizer(checkpoint)
    if found is None:
        raise FileNotFoundError(f"no tokenizer.json beside {checkpoint}: name the tokenizer that it was trained with")
    return found

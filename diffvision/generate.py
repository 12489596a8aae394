"""`diffvision generate`: continue a text with a language model, and print it token by token."""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffvision.data.text.tokenizers import Tokenizer


def generate_text(
    model: str,
    *,
    prompt: str,
    checkpoint: str | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    tokenizer: str | None = None,
    device: str = "auto",
) -> str:
    """Continue a prompt with a language model, and print the text token by token, up to the end of the document.

    By the chat template next to its tokenizer the end of an answer ends it too.

    Args:
        model: the directory of a run of our language training or a .ckpt of it, the folder of a language model, or a
            name with `checkpoint`.
        prompt: text to continue.
        checkpoint: if model is a name: its weights, a .ckpt file or a folder.
        max_new_tokens: the largest number of tokens to generate.
        temperature: 0 takes the likeliest token each time; 1 draws from the model's distribution.
        top_k: draw among the k likeliest tokens only.
        top_p: draw among the likeliest tokens that together reach this probability.
        seed: the same seed gives the same text on the same machine.
        tokenizer: tokenizer.json, or a directory that holds one; by default the one next to
            the weights, or the one of their training.
        device: auto (cuda where there is one), cpu, cuda, cuda:1, ...

    Returns:
        The continuation.

    Raises:
        ValueError: an empty prompt, one too long for the model, a model of images or of transformers', a
            tokenizer that is not the model's, or a setting out of its range.
        FileNotFoundError: no such model, or no tokenizer.
    """
    import torch

    from diffvision.evaluation.distributed import resolve_device
    from diffvision.models.language.generation import Sampling, generate
    from diffvision.models.threads import limit_threads
    from diffvision.opening import open_model

    if not prompt:
        raise ValueError("prompt must be a text to continue, got ''")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    Sampling(temperature=temperature, top_k=top_k, top_p=top_p)  # raises before the model is loaded
    device = resolve_device(device)
    opened = open_model(model, checkpoint, tokenizer=tokenizer, device=device).for_text()
    if opened.library != "language":
        raise ValueError(f"{model} is a model of transformers: call its own `generate`")
    language_model: Any = opened.module
    text_tokenizer = opened.tokenizer
    if text_tokenizer is None:
        raise FileNotFoundError(
            f"no tokenizer.json next to {opened.weights}: give --tokenizer, the one that it was trained with"
        )
    printer = _Printer(text_tokenizer, prompt)
    with limit_threads(device, language_model):
        generate(
            language_model,
            [([] if text_tokenizer.start_id is None else [text_tokenizer.start_id]) + text_tokenizer.encode(prompt)],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop=opened.ends,
            vocab_size=text_tokenizer.vocab_size,
            generator=torch.Generator(device).manual_seed(seed),
            on_token=lambda _, token: printer.add(token),
        )
    return printer.end()


class _Printer:
    """Prints a prompt and the text of new tokens; a character is printed once all of its bytes are generated."""

    def __init__(self, tokenizer: "Tokenizer", prompt: str) -> None:
        self.tokenizer, self.prompt, self.tokens, self.printed = tokenizer, prompt, list[int](), 0

    def add(self, token: int) -> None:
        self.tokens.append(token)
        text = self.prompt + self.tokenizer.decode(self.tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._print(text)

    def end(self) -> str:
        """Print the rest of the text, and return the text of the new tokens."""
        text = self.tokenizer.decode(self.tokens)
        self._print(f"{self.prompt}{text}\n")
        return text

    def _print(self, text: str) -> None:
        sys.stdout.write(text[self.printed :])
        sys.stdout.flush()
        self.printed = len(text)

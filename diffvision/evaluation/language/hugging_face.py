"""Hugging Face's models among ours: loading, their tokenizers, and their attention laid open. transformers is imported
only when one is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from diffvision.models.bounds import bounded
from diffvision.models.files import tensors_only

_NAME = "diffvision_explicit"


class HuggingFaceTokenizer:
    """A tokenizer of transformers with the names that ours has.

    Attributes:
        start_id: token that a text begins with, where the model wants one.
        eos_id: token that ends a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.eos_id: int | None = tokenizer.eos_token_id
        self.start_id: int | None = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special ones: one whose name is written in the text is text, as in ours."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def decode(self, ids: list[int]) -> str:
        """The text of tokens."""
        return self.tokenizer.decode(ids)


def load_hugging_face(path: str) -> tuple[nn.Module, HuggingFaceTokenizer | None]:
    """A causal language model and its tokenizer (None if the folder has none), from a folder or the Hub's name.

    Folders that `models.language.transformers.export` wrote open too: our classes are known without their code.

    Raises:
        ValueError: transformers is missing, or finds no causal language model there; the folder has code or pickles,
            which are not run.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        import diffvision.models.language.transformers  # noqa: F401  (registers our classes)
    except ImportError as error:
        raise ValueError(f"hf:{path} needs transformers 5 or later: pip install diffvision[hf] ({error})") from error
    model = _opened(AutoModelForCausalLM, path, "causal language model")
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return model, None
    return model, HuggingFaceTokenizer(_opened(AutoTokenizer, path, "tokenizer"))


def _opened(kind: Any, path: str, what: str) -> Any:
    """What one of transformers' Auto classes finds, if that needs nothing to be run; else a ValueError."""
    folder = Path(path)
    with bounded(folder if folder.is_dir() else path):
        try:
            with tensors_only(f"hf:{path}"):
                return kind.from_pretrained(path, trust_remote_code=False)  # left out, it would ask
        except (OSError, ValueError, RuntimeError) as error:  # the last of weights of other sizes, and of deep JSON
            if "trust_remote_code" in str(error):
                raise ValueError(
                    f"hf:{path} has code of its own for its {what} (trust_remote_code), which is not run: give a model "
                    "that transformers knows, or convert it with code that you have read"
                ) from error
            first = str(error).strip().splitlines()[0]
            raise ValueError(f"transformers finds no {what} at {path!r}: {first}") from error


@contextmanager
def explicit_attention(model: Any, look: Callable[..., Any]) -> Iterator[None]:
    """Within it, the model's attention is computed from the maps [B, H, P, M, N] of
    `look(q, k, lam, mask, is_causal, scale)`, with q [B, H, P, M, D] (P = 2 for DiffLlama, whose heads i and i + H are
    a pair).

    Raises:
        ValueError: an attention that has more to it than softmax of scaled products (softcap, sinks).
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    last: dict[str, Any] = {"query": None}  # DiffLlama asks twice in a row, for the halves of its values

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
    ) -> tuple[Tensor, None]:
        if unknown := [name for name in ("softcap", "s_aux", "position_bias") if settings.get(name) is not None]:
            raise ValueError(f"{type(module).__name__} has {', '.join(unknown)}, which cannot be laid open")
        if query is not last["query"]:
            maps = hasattr(module, "lambda_q1") + 1
            keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            q, k = (part.unflatten(1, (maps, -1)).transpose(1, 2) for part in (query, keys))
            lam = _diff_llama_lambda(module) if maps == 2 else None
            causal = attention_mask is None and getattr(module, "is_causal", True)
            scale = settings.get("scaling") or query.shape[-1] ** -0.5
            seen = look(q, k, lam, attention_mask, causal, scale)
            last.update(query=query, maps=seen.maps().transpose(1, 2).flatten(1, 2))
        values = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        out = last["maps"] @ values.to(last["maps"].dtype)
        return out.transpose(1, 2).to(value.dtype), None

    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, mask)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _diff_llama_lambda(module: Any) -> Tensor:
    """A DiffLlama layer's lambda, [1, 1, 1, 1]."""
    first = (module.lambda_q1.float() * module.lambda_k1.float()).sum().exp()
    second = (module.lambda_q2.float() * module.lambda_k2.float()).sum().exp()
    return (first - second + module.lambda_init).view(1, 1, 1, 1)

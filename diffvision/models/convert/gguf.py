"""Models in llama.cpp's GGUF files, of the Llama family: weights, configuration, tokenizer and chat template.

GGUF stores the rows of the query and key projections for rotary pairs that are side by side, as ours are, so no row is
moved. Weights in fewer bits become float32: what the file rounded away is not restored. The tokenizer is made in
`gguf_tokenizer.py`.

Source: ggml-org/ggml docs/gguf.md; ggml-org/llama.cpp gguf-py constants.py (architecture "llama").
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffvision.models.convert.gguf_sizes import check_sizes
from diffvision.models.convert.gguf_tokenizer import tokenizer_from_gguf
from diffvision.models.convert.state import check_finite
from diffvision.models.convert.transformers import check_settings
from diffvision.models.language.configuration import LanguageConfig

ARCHITECTURE = "llama"
_WEIGHTS = {"token_embd": "embed", "output_norm": "norm", "output": "head"}
_BLOCK_WEIGHTS = {
    "attn_norm": "norm1",
    "attn_q": "attn.q_proj",
    "attn_k": "attn.k_proj",
    "attn_v": "attn.v_proj",
    "attn_output": "attn.proj",
    "ffn_norm": "norm2",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
}
_NEEDED = (
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "context_length",
)
_NO_SETTING = ("logit_scale", "attention.scale", "attention.clamp_kqv", "attention.sliding_window")
_FREQUENCIES = "rope_freqs.weight"  # factors of the rotary frequencies, of Llama 3.1 and later


class Gguf:
    """A GGUF file of a Llama: what it says, and its tensors.

    Args:
        path: the file.

    Attributes:
        metadata: {key: value} of the file.

    Raises:
        ValueError: the package `gguf` is missing, or the file is damaged, of another architecture, or one of several.
    """

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ModuleNotFoundError as error:
            raise ValueError(f"{path} needs {error.name} to be read: pip install 'diffvision[gguf]'") from None
        self.path = path
        try:
            check_sizes(path)
            reader = GGUFReader(path)
            self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        except Exception as error:  # a damaged file can fail the reader in any way
            raise ValueError(f"{path} is damaged or no GGUF file ({path.stat().st_size:,} bytes): {error}") from error
        self._tensors = reader.tensors
        architecture = self.metadata.get("general.architecture")
        if architecture != ARCHITECTURE:
            raise ValueError(f"{path} is a GGUF file of architecture {architecture!r}: only {ARCHITECTURE!r} is read")
        if reader.byte_order == "S":
            raise ValueError(f"{path} is big-endian, which is not read: convert the model to GGUF on this machine")
        if (files := self.metadata.get("split.count", 1)) not in (0, 1):
            raise ValueError(f"{path} is one of {files} files: merge them with llama.cpp's llama-gguf-split --merge")

    def config(self) -> LanguageConfig:
        """Return the configuration.

        Raises:
            ValueError: a setting is missing, or our model has none like it (scaled or partial rotary positions,
                experts, values of another size than keys).
        """
        try:
            return self._config()
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.path} has settings of other types than GGUF's ({error}): convert it again"
            ) from error

    def _config(self) -> LanguageConfig:
        """Return the model's configuration; a setting that our model lacks is refused."""
        get = self._setting
        if missing := [name for name in _NEEDED if get(name) is None]:
            raise ValueError(f"{self.path} lacks {ARCHITECTURE}.{missing[0]}: convert the model to GGUF again")
        for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
            if isinstance(get(name), list):
                raise ValueError(
                    f"{self.path} has another {name} in every layer, and one is supported: give another model"
                )
        dim, heads = get("embedding_length"), get("attention.head_count")
        size = get("attention.key_length", dim // max(heads, 1))
        kv_heads = get("attention.head_count_kv", heads)
        fixed = {
            "expert_count": 0,
            "attention.value_length": size,
            "rope.dimension_count": size,
            "rope.scaling.type": "none",
            "rope.scale_linear": 1.0,
            "rope.scaling.factor": 1.0,
            "rope.scaling.attn_factor": 1.0,
            "attention.causal": True,
            "use_parallel_residual": False,
            **dict.fromkeys(_NO_SETTING),
        }
        given = {name: get(name) for name in fixed}
        given["rope.scaling.factor"] = given["rope.scaling.factor"] or None  # 0 stands for none
        check_settings(str(self.path), given, "our model", fixed)
        names = {tensor.name for tensor in self._tensors}
        embedding = [int(tensor.shape[1]) for tensor in self._tensors if tensor.name == "token_embd.weight"]
        vocabulary = get("vocab_size") or len(self.metadata.get("tokenizer.ggml.tokens", ())) or sum(embedding)
        try:
            return LanguageConfig(
                vocab_size=vocabulary,
                dim=dim,
                depth=get("block_count"),
                num_heads=heads,
                num_kv_heads=None if kv_heads == heads else kv_heads,
                head_dim=size,
                mlp_dim=get("feed_forward_length"),
                variant="standard",
                max_length=get("context_length"),
                rotary_theta=get("rope.freq_base", 10_000.0),
                tied="output.weight" not in names,
                norm_eps=float(f"{get('attention.layer_norm_rms_epsilon'):.6g}"),  # stored in float32
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.path} has a configuration that is not one of a language model: {error}") from error

    def state(self) -> dict[str, Tensor]:
        """Return the weights by the names of a `LanguageModel`, in float32.

        Raises:
            ValueError: the file is damaged, or a tensor is of an unknown name or of a type that is not read.
        """
        from gguf.quants import dequantize

        state = {}
        for tensor in self._tensors:
            try:
                values = dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError:
                raise ValueError(
                    f"{self.path} has {tensor.name} in {tensor.tensor_type.name}, which is not read: convert the model "
                    "to F16 or Q8_0"
                ) from None
            weight = torch.from_numpy(values.copy()).float().reshape([int(size) for size in reversed(tensor.shape)])
            if tensor.name == _FREQUENCIES:
                if not bool((weight == 1).all()):
                    raise ValueError(
                        f"{self.path} has {_FREQUENCIES}, and scaled rotary positions are not supported: give "
                        "another model"
                    )
                continue
            state[self._name(tensor.name)] = weight
        check_finite(state, str(self.path))
        return state

    def origin(self) -> str:
        """Return what a model of this file is made of: its names, its license, and how many tensors are rounded."""
        about = [self.metadata.get(f"general.{name}") for name in ("name", "organization", "license")]
        named = ", ".join(str(value) for value in about if value)
        counts = Counter(tensor.tensor_type.name for tensor in self._tensors)
        rounded = [f"{count} to {name}" for name, count in counts.most_common() if name not in ("F32", "F16", "BF16")]
        lost = (
            f" Of its {len(self._tensors)} tensors the file has rounded {' and '.join(rounded)}; that is not restored."
        )
        return f"Converted from {self.path.name}{f' ({named})' if named else ''}.{lost if rounded else ''}"

    def write_tokenizer(self, folder: Path, vocab_size: int) -> Path:
        """Write tokenizer.json and tokenizer_config.json, with the chat template, to a folder; return the former.

        Raises:
            ValueError: it has more tokens than the model, or see `tokenizer_from_gguf`.
        """
        tokenizer, settings = tokenizer_from_gguf(self.metadata, str(self.path))
        if (size := tokenizer.get_vocab_size()) > vocab_size:
            raise ValueError(
                f"{self.path} is damaged (tokenizer of {size} tokens, embeddings of {vocab_size}): download it again"
            )
        file = folder / "tokenizer.json"
        tokenizer.save(str(file))
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        file.with_name("tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
        return file

    def _setting(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"{ARCHITECTURE}.{name}", default)

    def _name(self, name: str) -> str:
        """Return our name of a tensor."""
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        known: Mapping[str, str] = _BLOCK_WEIGHTS if block else _WEIGHTS
        part = block[2] if block else name.removesuffix(".weight")
        if part not in known or not name.endswith(".weight"):
            raise ValueError(
                f"{self.path} has the tensor {name}, which our Llama lacks: give a Llama or Qwen-like model"
            )
        return f"blocks.{block[1]}.{known[part]}.weight" if block else f"{known[part]}.weight"

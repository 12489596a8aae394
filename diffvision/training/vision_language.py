"""Training of vision-language models: one LightningModule.

What it shares with others is in `next_token` and `module`, its optimizer in `optim`. What a checkpoint records is in
`models.vision_language`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from diffvision.data.batches import VisionLanguageBatch
from diffvision.data.conversations import VisionLanguageData
from diffvision.data.text.tokenizers import load_tokenizer
from diffvision.models.architecture import KEY, architecture
from diffvision.models.weight_files import FOLDER
from diffvision.opening.specs import register_diffllama_v2
from diffvision.training.compilation import compile_in_place
from diffvision.training.next_token import NextTokenModule, shift
from diffvision.training.optim import OptimizerSettings, param_groups

PARTS = {"tower": "vision_tower", "projector": "multi_modal_projector", "language_model": "language_model"}
"""Name of a part in `train` -> the model's attribute."""
BARE_HEADS = ("diffllama", "diffllama_v2", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3")
"""Kinds of language models whose logits are the decoder's states times a weight: no bias, scale or cap."""
LLAVA = OptimizerSettings(lr=2e-5, weight_decay=0.0)


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Settings of LoRA, low-rank adapters of the language model's layers (arXiv 2106.09685), by PEFT.

    Attributes:
        r: rank of the adapters.
        alpha: their output is scaled by alpha / r.
        dropout: on their inputs.
        targets: the names of the decoder's layers, such as [q_proj, v_proj]; or "all-linear".
    """

    r: int = 8
    alpha: int = 16
    dropout: float = 0.0
    targets: str | list[str] = "all-linear"


class VisionLanguageModule(NextTokenModule):
    """A `TimmLlava` that learns the answers of conversations about images.

    The loss of an optimizer step is the mean over all learned tokens of its batches on all ranks; the logged loss is
    that of one batch. Parts that are not trained have no gradients and stay in evaluation mode.

    Attributes:
        model: the `TimmLlava`; its keys in a checkpoint's state_dict have the prefix "model.".
        tokenizer: the argument.
        trained: the parts of the model that are trained.
    """

    batch_keys: ClassVar = ("image", "tokens", "lengths", "learned")
    required_keys: ClassVar = ("image", "tokens", "learned")
    data_class: ClassVar = VisionLanguageData
    adamw: ClassVar = {"betas": (0.9, 0.999), "eps": 1e-8}

    def __init__(
        self,
        model: str | dict[str, Any],
        *,
        tower: str | None = None,
        tower_args: dict[str, Any] | None = None,
        tower_pretrained: str | None = None,
        language: str | None = None,
        language_args: dict[str, Any] | None = None,
        model_args: dict[str, Any] | None = None,
        tokenizer: str | None = None,
        pretrained: str | None = None,
        train: str | list[str] = "all",
        optimizer: OptimizerSettings = LLAVA,
        projector_lr: float | None = None,
        lora: Lora | None = None,
        grad_checkpointing: bool = False,
        compile: bool = False,
    ) -> None:
        """Build the model, and choose which parts are trained.

        Args:
            model: name of a vision-language model, such as "vlm-debug" or "diff-vlm-debug"; "local-dir:FOLDER", a saved
                one to start from; or a configuration, as a checkpoint records it.
            tower: replaces the named model's image tower: a name of timm.
            tower_args: arguments of the tower.
            tower_pretrained: weights of the tower: a tag, a file or a folder.
            language: replaces the named model's language model: a name of this package, local-dir:FOLDER or hf:PATH.
            language_args: fields of `LanguageConfig`, if `language` is a name.
            model_args: fields of `TimmLlavaConfig` (feature_layer, projector, shuffle, preprocess).
            tokenizer: tokenizer.json or its folder; by default the language model's.
            pretrained: run, checkpoint or folder of an earlier stage of the same model, to start from.
            train: "all", "projector", or a list of parts: tower, projector, language_model.
            optimizer: settings of the optimizer and schedule, or a dictionary of those that differ from the defaults,
                which are LLaVA-1.5's.
            projector_lr: highest learning rate of the projector; null: the optimizer's.
            lora: settings of LoRA, to train adapters of the language model instead of its weights; or a dictionary.
            grad_checkpointing: recompute the blocks' activations in the backward pass.
            compile: torch.compile the tower and the language model's decoder, in place.

        Raises:
            ValueError: a setting is unknown or out of range, or weights or tokenizer are of another model.
        """
        lora = Lora(**lora) if isinstance(lora, dict) else lora
        super().__init__(locals() | {"lora": asdict(lora) if lora else None}, LLAVA)
        register_diffllama_v2("VisionLanguageModule")
        self.tokenizer, self.lora, self.projector_lr = tokenizer, lora, projector_lr
        self.trained = _parts(train)
        if projector_lr is not None and (projector_lr <= 0 or "projector" not in self.trained):
            raise ValueError(f"projector_lr must be above 0, or null if train leaves projector out, got {projector_lr}")
        if lora is not None and "language_model" not in self.trained:
            raise ValueError(f"train must include language_model if lora is set, got {train!r}")
        from diffvision.models import vision_language

        self.name = model if isinstance(model, str) else vision_language.TimmLlavaConfig.model_type
        if isinstance(model, dict):
            self.model = vision_language.TimmLlava(vision_language.TimmLlavaConfig.from_dict(model))
        elif model.startswith(FOLDER):
            self.model, _ = _open(model)
            self.sources = [model.removeprefix(FOLDER)]
        else:
            chosen: dict[str, Any] = {"tower": tower, "tower_args": tower_args, "tower_pretrained": tower_pretrained}
            chosen |= {"language": language, "language_args": language_args, "tokenizer": tokenizer}
            chosen = {name: value for name, value in chosen.items() if value is not None}
            self.model = vision_language.create(model, **chosen, **(model_args or {}))
            words = language if ":" in (language or "") else None
            self.sources = [source for source in (tower_pretrained, words) if source is not None]
        if pretrained is not None:
            self._start_from(pretrained)
            self.sources = [pretrained]
        self._set_trained_parts(grad_checkpointing)
        self.returns_logits = self.model.language_model.config.model_type not in BARE_HEADS
        if compile:
            compile_in_place(self.model.vision_tower, dynamic=True)  # images and tokens differ from batch to batch
            compile_in_place(self.model.language_model.base_model, dynamic=True)
        self.train()

    def _start_from(self, source: str) -> None:
        from diffvision.models.vision_language import check_record, record

        loaded, about = _open(source)
        check_record({"config": record(loaded), KEY: architecture(loaded)}, self.model, source)
        self._check_tokenizer(about, source)
        self.model.load_state_dict(loaded.state_dict())

    def _set_trained_parts(self, grad_checkpointing: bool) -> None:
        """Freeze the other parts, add adapters, and set activation checkpointing."""
        for part, name in PARTS.items():
            getattr(self.model, name).requires_grad_(part in self.trained)
        if self.lora is not None:
            _add_adapters(self.model.language_model, self.lora)
        if "tower" in self.trained:
            _freeze_unreached(self.model)
            self.model.vision_tower.timm_model.set_grad_checkpointing(grad_checkpointing)
        if grad_checkpointing:
            self.model.language_model.gradient_checkpointing_enable({"use_reentrant": False})

    def train(self, mode: bool = True) -> VisionLanguageModule:
        """Set the mode; parts that are not trained stay in evaluation mode."""
        super().train(mode)
        for part, name in PARTS.items():
            if part not in self.trained and hasattr(self, "model"):
                getattr(self.model, name).eval()
        for layer in self.modules():
            if getattr(layer, "gradient_checkpointing", False):
                layer.training = mode  # transformers recomputes no activations in evaluation mode
        return self

    @cached_property
    def processor(self) -> Any:
        """The processor of the model, for its data.

        Raises:
            FileNotFoundError, ValueError: there is no tokenizer, or it is another model's.
        """
        from diffvision.models.vision_language import make_processor

        if self.tokenizer is None:
            raise ValueError("model.tokenizer is not set: give the language model's tokenizer.json or its folder")
        return make_processor(self.model, self.tokenizer)

    @cached_property
    def fingerprint(self) -> str | None:
        """Digest of the tokenizer; None without one."""
        return None if self.tokenizer is None else load_tokenizer(self.tokenizer).fingerprint

    @property
    def image_tokens(self) -> int:
        """Number of tokens for each image."""
        return self.model.image_tokens

    @property
    def _divisor(self) -> int:
        return 1024

    def setup(self, stage: str) -> None:
        """Check that the data's conversations are not longer than the language model reads."""
        length = getattr(getattr(self.trainer, "datamodule", None), "length", None)
        limit = getattr(self.model.config.text_config, "max_position_embeddings", None)
        if isinstance(length, int) and limit is not None and length > limit:
            raise ValueError(f"data.length must be at most the language model's {limit} tokens, got {length}")

    def forward(self, tokens: Tensor, image: Tensor | None = None) -> Tensor:
        """Return logits [B, N, vocab_size] of the tokens that follow each of `tokens` [B, N]."""
        return self.model(tokens, image).logits

    @property
    def head_weight(self) -> Tensor:
        """The weight of the language model's output projection."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def compute_states(self, batch: VisionLanguageBatch) -> tuple[Tensor, Tensor]:
        """Return final hidden states [B, N, dim], or logits, and their targets [B, N].

        Padding is on the right, where causal attention cannot see it, so no mask is needed.
        """
        inputs, targets, _ = shift(batch)
        # DDP waits for the projector's gradients: without images, a blank one gives zeros.
        pixels = batch["image"] if len(batch["image"]) else batch["image"].new_zeros(1, 3, *self.model.image_size)
        images = self.model.get_image_features(pixels).pooler_output
        words = self.model.language_model
        if len(batch["image"]):
            embeds = self.model.embed(inputs, images)
        else:
            embeds = self.model.embed(inputs) + 0 * images.sum()
        if self.returns_logits:
            return words(inputs_embeds=embeds, use_cache=False).logits, targets
        return words.base_model(inputs_embeds=embeds, use_cache=False).last_hidden_state, targets

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the trained parameters in groups, each with its weight decay, the projector at its own rate."""
        scale = None if self.projector_lr is None else self.projector_lr / self.settings.lr
        named = [name for name, _ in self.model.named_parameters() if name.startswith(f"{PARTS['projector']}.")]
        scales = None if scale is None else dict.fromkeys(named, scale)
        return param_groups(self.model, self.settings, scales=scales)

    def check_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise ValueError if a checkpoint is of another model. `fit` calls this before reading data."""
        from diffvision.models.vision_language import check_record

        what = str(getattr(self.attached_trainer, "ckpt_path", None) or "the checkpoint")
        about = checkpoint.get("diffvision", {})
        check_record(about, self.model, what)
        here = asdict(self.lora) if self.lora else None
        if (there := about.get("lora")) != here:
            raise ValueError(f"model.lora must be {there}, as in {what}, got {here}")
        self._check_tokenizer(about, what)

    def _check_tokenizer(self, about: dict[str, Any], what: str) -> None:
        prints = {about.get("fingerprint"), self.fingerprint} - {None}
        if len(prints) > 1:
            raise ValueError(f"model.tokenizer must be that of {what}, got {self.tokenizer}")

    def describe(self) -> dict[str, Any]:
        """Return the model's name, tokenizer, configuration, adapters and architecture."""
        from diffvision.models.vision_language import record

        about: dict[str, Any] = {"model": self.name, "tokenizer": self.tokenizer, "fingerprint": self.fingerprint}
        about |= {"config": record(self.model), "lora": asdict(self.lora) if self.lora else None}
        return about | {KEY: architecture(self.model)}

    def arguments_without_weights(self) -> dict[str, Any]:
        """Return the model's configuration in place of the arguments that it was built from."""
        from diffvision.models.vision_language import record

        sources = ("tower", "tower_args", "tower_pretrained", "language", "language_args", "model_args", "pretrained")
        return {**dict.fromkeys(sources), "model": record(self.model)}


def _parts(train: str | list[str]) -> tuple[str, ...]:
    """Return the parts of a model that `train` names."""
    chosen = list(PARTS) if train == "all" else [train] if isinstance(train, str) else train
    if not chosen or not {*chosen} <= {*PARTS}:
        raise ValueError(f"train must be all, projector, or a list of {', '.join(PARTS)}, got {train!r}")
    return tuple(part for part in PARTS if part in chosen)


def _open(source: str) -> tuple[Any, dict[str, Any]]:
    """Open the model of a run, checkpoint or folder; return it and the checkpoint's record."""
    from diffvision.models.vision_language import TimmLlava, load
    from diffvision.opening.vlm import find_trained, open_vlm

    source = source.removeprefix(FOLDER)
    file = find_trained(source) or Path(source)
    if file.is_file():
        return load(file)
    if not isinstance(model := open_vlm(source).module, TimmLlava):
        raise ValueError(f"{source} must be a TimmLlava, which `diffvision export` writes, got {type(model).__name__}")
    return model, {}


def _add_adapters(language_model: nn.Module, lora: Lora) -> None:
    """Add LoRA's adapters to the decoder of a language model, and freeze all but them."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(f"lora needs PEFT: pip install peft, or leave lora out ({error})") from error
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    decoder: Any = language_model.base_model
    names = [f".{name}" for name, _ in decoder.named_modules()]
    for target in targets if isinstance(targets, list) else ():
        if not any(name.endswith(f".{target}") for name in names):  # PEFT only refuses targets of which none is there
            raise ValueError(f"lora.targets must name layers of the decoder, got {target}")
    try:
        settings = LoraConfig(r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets)
        inject_adapter_in_model(settings, decoder)
    except ValueError as error:
        raise ValueError(f"lora does not fit the language model: {error}") from error
    for name, layer in decoder.named_modules():
        if not isinstance(base := getattr(layer, "base_layer", None), nn.Linear | None):
            raise ValueError(
                f"lora.targets must name nn.Linear layers, to merge them, got {name}, {type(base).__name__}"
            )
    for name, parameter in language_model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def _freeze_unreached(model: Any) -> None:
    """Freeze weights that do not affect the features (later blocks): DDP would wait for their gradients."""
    parameters = list(model.vision_tower.parameters())
    total = model.eval().get_image_features(torch.zeros(1, 3, *model.image_size)).pooler_output.sum()
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_(gradient is not None)

"""Vision-language models in lmms-eval: `lmms_eval --model diffvision --model_args model=MODEL --tasks pope ...`.

lmms-eval finds `manifest` by its entry points and imports this module, which nothing of ours does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from lmms_eval.api.model import lmms
from lmms_eval.models.registry_v2 import ModelManifest


def manifest() -> ModelManifest:
    """Return what lmms-eval registers."""
    return ModelManifest("diffvision", simple_class_path=f"{__name__}.{DiffVision.__name__}")


class DiffVision(lmms):
    """Answers lmms-eval's questions greedily.

    Args:
        model: as `diffvision evaluate-vlm` takes it.
        batch_size: questions at a time.
        device: auto, cpu, cuda, cuda:1, ...
        **_: what lmms-eval passes besides.
    """

    def __init__(self, model: str, batch_size: int | str = 1, device: str = "auto", **_: Any) -> None:
        from diffvision.evaluation.distributed import resolve_device
        from diffvision.opening.vlm import open_vlm

        super().__init__()
        self._vlm, self._batch_size = open_vlm(model), int(batch_size)
        self._vlm.module.to(resolve_device(device))

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return an answer to each request, cut before the strings that end it.

        Raises:
            ValueError: a task that samples, or one whose visuals are no images.
        """
        from diffvision.evaluation.output_files import bar
        from diffvision.evaluation.vision_language.answers import generate_answers

        answers: list[str] = []
        groups = [[*alike] for _, alike in itertools.groupby((one.args for one in requests), key=lambda args: args[1])]
        size = self._batch_size
        batches = [alike[start : start + size] for alike in groups for start in range(0, len(alike), size)]
        for batch in bar(batches, "answers"):
            settings, questions = batch[0][1], []
            if settings.get("do_sample") and settings.get("temperature", 1):
                raise ValueError(
                    f"the task samples at temperature {settings.get('temperature')}: set do_sample to false"
                )
            for text, _, visuals, document, task, split in batch:
                images = visuals(self.task_dict[task][split][document]) or []
                if not all(hasattr(image, "convert") for image in images):
                    raise ValueError(f"{task} shows a {type(images[0]).__name__}: take a task of images")
                questions.append((text, [image.convert("RGB") for image in images]))
            texts = generate_answers(
                self._vlm.module, self._vlm.processor, questions, settings.get("max_new_tokens", 128)
            )
            ends = settings.get("until") or []
            for end in [ends] if isinstance(ends, str) else ends:
                texts = [text.partition(end)[0] for text in texts]
            answers += texts
        return answers

    def loglikelihood(self, requests: Sequence[Any]) -> Any:
        """Refuse tasks that choose by likelihood."""
        raise NotImplementedError("neither likelihoods nor several rounds: take a task of type generate_until")

    generate_until_multi_round = loglikelihood

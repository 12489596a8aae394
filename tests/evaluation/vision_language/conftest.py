"""A tiny Llava of transformers with its processor, and a question file of each kind."""

import json
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from diffvision.data.text.tokenizers import train_tokenizer

TEMPLATE = (
    "{% for message in messages %}USER: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>\n{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %} ASSISTANT:"
)
QUESTIONS = {
    "pope_random": [
        {"question_id": number, "image": f"{number // 4}.png", "text": f"Is there a {word}?", "label": label}
        for number, (word, label) in enumerate([("star", "yes"), ("cross", "no"), ("moon in the image", "no")] * 4)
    ],
    "captions": [
        {"question_id": number, "image": f"{number}.png", "text": "Describe the image.", "objects": ["star"]}
        for number in range(2)
    ],
    "vqa": [
        {"question_id": "a", "image": "0.png", "text": "How many?", "label": 3, "kind": "count"},
        {"question_id": "b", "image": "1.png", "text": "Which?", "label": ["red", "crimson"], "kind": "colour"},
        {"question_id": "c", "image": ["1.png", "2.png"], "text": "Which?", "label": "red", "held_out": True},
    ],
}


@pytest.fixture(scope="session")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    rows = [row["text"] for rows in QUESTIONS.values() for row in rows]
    own = train_tokenizer([*rows, "USER: ASSISTANT: yes no red 0123456789"], 300)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own._backend,
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
    )


@pytest.fixture(scope="session")
def vlm(tokenizer):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = transformers.LlavaProcessor(
        images, tokenizer, patch_size=16, vision_feature_select_strategy="default", chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    )  # fmt: skip
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**small, image_size=32, patch_size=16, initializer_range=1.0),
        text_config=transformers.LlamaConfig(
            **small, vocab_size=len(tokenizer), max_position_embeddings=128, initializer_range=1.0
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=3.0)
    return SimpleNamespace(module=model, processor=processor, name="tiny")


@pytest.fixture
def questions(tmp_path):
    """The folder of the question files, with its images."""
    folder = tmp_path / "test"
    (folder / "images").mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (40, 32), (80 * number, 255 - 80 * number, 0)).save(folder / "images" / f"{number}.png")
    for name, rows in QUESTIONS.items():
        (folder / f"{name}.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "objects.txt").write_text("star\ncross\nmoon, crescent\n")
    (folder / "sizes.json").write_text('{"a": 1}')
    return folder

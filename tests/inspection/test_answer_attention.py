"""`diffvision inspect` of vision-language models: the answer, and where in the images each word was read from."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessor, CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaProcessor
from transformers import LlavaForConditionalGeneration as Llava

from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.inspection import answer_attention as answers
from diffvision.inspection import inspect
from diffvision.inspection.answer_attention import inspect_answer
from diffvision.inspection.inputs import Picture
from diffvision.models.vision_language import create, make_processor, with_image_token
from diffvision.opening import Model

ASKED = "where is the star?"
TEMPLATE = "{% for part in messages[0].content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder with a small tokenizer.json."""
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = ["where is the star? there is a red star, a blue circle and a green square in the picture"] * 3
    train_tokenizer(texts, 290).save(folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def pictures():
    """Two pictures of noise that are not square."""
    rng = np.random.default_rng(0)
    return [Picture(name, Image.fromarray(rng.integers(0, 255, (40, 48, 3), dtype=np.uint8))) for name in "ab"]


def ours(tokenizer, name="diff-vlm-debug"):
    torch.manual_seed(0)
    model = create(name, language_args={"vocab_size": 300, "max_length": 256}, tokenizer=tokenizer).eval()
    return Model(name, "transformers", model, processor=make_processor(model, tokenizer))


def test_the_maps_are_those_of_transformers(tokenizer, pictures, monkeypatch):
    monkeypatch.setattr(answers, "MOST_TOKENS", 1)
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = LlamaConfig(vocab_size=300, max_position_embeddings=256, num_key_value_heads=2, **sizes)
    words = with_image_token(tokenizer, text)
    vision = CLIPVisionConfig(image_size=32, patch_size=8, **sizes)
    place = words.convert_tokens_to_ids("<image>")
    model = Llava(LlavaConfig(vision_config=vision, text_config=text, image_token_id=place)).eval()
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32),
        words,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
        image_token="<image>",
    )
    vlm = Model("llava", "transformers", model, processor=processor)
    answer = inspect_answer(vlm, pictures, ASKED)
    asked = processor(text=f"<image><image>{ASKED}", images=[one.image for one in pictures],
                      return_tensors="pt")  # fmt: skip
    model.set_attn_implementation("eager")
    rows = [layer[0, :, -1, asked["input_ids"][0] == model.config.image_token_id].mean(0).reshape(2, 4, 4)
            for layer in model(**asked, output_attentions=True).attentions]  # fmt: skip
    token = model.generate(**asked, do_sample=False, max_new_tokens=1)[0, -1]
    assert answer.words == [words.decode(token).strip()]
    torch.testing.assert_close(answer.maps["attention"][0], torch.stack(rows).mean(0))
    last = inspect_answer(vlm, pictures, ASKED, [1])
    torch.testing.assert_close(last.maps["attention"][0], rows[1])
    with pytest.raises(ValueError, match="layers"):
        inspect_answer(vlm, pictures, ASKED, [1, 2])


def test_both_maps_and_their_difference(tokenizer, pictures):
    vlm = ours(tokenizer)
    for layer in vlm.module.language_model.modules():
        if hasattr(layer, "lambda_proj"):
            torch.nn.init.zeros_(layer.lambda_proj.weight)  # lambda is sigmoid(0)
    answer = inspect_answer(vlm, pictures, ASKED)
    first, second, difference = answer.maps.values()
    assert list(answer.maps) == ["map 1", "map 2", "difference"]
    assert first.shape == (len(answer.words), 2, 4, 4)
    torch.testing.assert_close(difference, first - second / 2)
    assert not torch.allclose(first, second)


@pytest.fixture
def folder(tokenizer, tmp_path, monkeypatch):
    """A saved model and a picture next to it."""
    monkeypatch.setattr(answers, "MOST_TOKENS", 2)
    vlm = ours(tokenizer)
    vlm.module.save_pretrained(tmp_path / "vlm")
    vlm.processor.save_pretrained(tmp_path / "vlm")
    Image.new("RGB", (48, 40), "red").save(tmp_path / "red.png")
    return tmp_path


@pytest.mark.slow
def test_the_page_of_an_answer(folder):
    inspect(f"eyes={folder}/vlm", image=f"{folder}/red.png", text=[ASKED, "a red star?"], output=f"{folder}/seen")
    page = (folder / "seen/index.html").read_text()
    content = json.loads((folder / "seen/statistics.json").read_text())
    *towers, first, second = content["models"]["eyes"]
    assert [one["tower"] for one in towers] == ["image"]
    assert [first["input"], second["input"]] == [ASKED, "a red star?"]
    assert set(first["maps"]) == {"map 1", "map 2", "difference"}
    assert np.shape(first["maps"]["difference"]) == (len(first["words"]), 1, 4, 4)
    assert {"answer-1-1.png", "answer-2-1.png", "sinks-image.png"} <= set(content["files"])
    assert "Image tower, sinks" in page
    assert ASKED in page

"""Vision-language models: placeholders, padding, generation and folders."""

import pytest
import torch
from PIL import Image

from diffvision.models import vision_language
from diffvision.models.vision_language import VisionLanguageConfig, create, make_processor


def small(name="vlm-debug", *, seed=0, **settings):
    """A model with large weights, whose likeliest tokens differ from position to position."""
    torch.manual_seed(seed)
    model = create(name, language_args={"vocab_size": 97, "max_length": 128, "tied": False}, **settings).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
        for parameter in [*model.language_model.model.blocks.parameters(), *model.projector.parameters()]:
            if parameter.dim() == 2:
                parameter.normal_(std=0.2)
    return model


def text(model, *parts):
    """A row of tokens: "image" for an image's placeholders, numbers for themselves."""
    place = [model.config.image_token_id] * model.image_tokens
    return torch.tensor([[token for part in parts for token in (place if part == "image" else [part])]])


@pytest.fixture(params=["vlm-debug", "diff-vlm-debug"])
def model(request):
    return small(request.param)


def test_an_image_stands_where_its_placeholders_are(model):
    images = torch.randn(2, 3, *model.image_size)
    ids = text(model, 5, "image", 7, "image", 9)
    logits = model(ids, images).logits
    features = model.image_features(images)
    assert features.shape == (2, model.image_tokens, model.config.text_config.hidden_size)
    table = model.get_input_embeddings().weight
    embeds = torch.cat([table[5][None], features[0], table[7][None], features[1], table[9][None]])[None]
    torch.testing.assert_close(logits, model.language_model(inputs_embeds=embeds).logits)
    torch.testing.assert_close(model.hidden(ids, images) @ model.head_weight.T, logits)
    assert not torch.allclose(model(ids, images.flip(0)).logits[:, -1], logits[:, -1])


def test_text_alone_is_the_language_model(model):
    ids = torch.randint(1, 97, (2, 9))
    torch.testing.assert_close(model(ids).logits, model.language_model(ids).logits)


@pytest.mark.parametrize(
    ("parts", "images"), [((5, 6), 1), ((5, "image"), 0), (("image", "image", 5), 1), (("image", 4), 2)]
)
def test_images_without_placeholders_and_the_reverse(parts, images):
    model = small()
    pixels = torch.zeros(images, 3, *model.image_size) if images else None
    with pytest.raises(ValueError, match="placeholders"):
        model(text(model, *parts), pixels)


def test_more_image_tokens_than_the_context():
    model = small()
    count = 128 // model.image_tokens + 1
    with pytest.raises(ValueError, match="context of 128"):
        model(text(model, *["image"] * count), torch.zeros(count, 3, *model.image_size))
    with pytest.raises(ValueError, match="context of 8"):
        create(language_args={"max_length": 8})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"feature_layer": 3}, "feature_layer"),
        ({"projector": "mpl"}, "projector"),
        ({"shuffle": 2}, "shuffle"),
        ({"projector": "pixel_shuffle", "shuffle": 3}, "shuffle"),
        ({"tower": "vit_bsae_patch16_224"}, "vit_bsae_patch16_224"),
    ],
)
def test_settings_that_do_not_fit(settings, named):
    with pytest.raises(ValueError, match=named):
        create(**settings)


def test_pixel_shuffle_joins_squares_of_patches():
    projector = vision_language.PixelShuffleProjector(3, 12, 2)
    with torch.no_grad():
        projector.proj.weight.copy_(torch.eye(12))
    features = torch.randn(1, 3, 4, 6)
    token = projector(features)[0, 4]  # the second square of the second row
    expected = [features[0, :, row, column] for row in (2, 3) for column in (2, 3)]
    torch.testing.assert_close(token, torch.cat(expected))


def test_generation_with_padding_and_cache(model):
    images = torch.randn(3, 3, *model.image_size)
    rows = [text(model, 5, "image", 7, "image", 9), text(model, "image", 3)]
    longest = rows[0].shape[1]
    alone = [
        model.generate(row, pixel_values=images[part], max_new_tokens=6, do_sample=False)[0, row.shape[1] :]
        for row, part in zip(rows, (slice(0, 2), slice(2, 3)), strict=True)
    ]
    padded = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
    mask = torch.tensor([[0] * (longest - row.shape[1]) + [1] * row.shape[1] for row in rows])
    for settings in ({}, {"use_cache": False}, {"num_beams": 1, "num_return_sequences": 1}):
        together = model.generate(
            padded, pixel_values=images, attention_mask=mask, max_new_tokens=6, do_sample=False, **settings
        )[:, longest:]
        assert together.tolist() == [row.tolist() for row in alone]


def test_configuration_defaults():
    config = VisionLanguageConfig(text_config={"model_type": "llama", "vocab_size": 40})
    assert config.image_token_id == 40


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder with a small tokenizer.json."""
    from diffvision.data.text.tokenizers import train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["Is there a star in the image? Yes. No.", "USER: a red cross ASSISTANT: two"] * 4, 300).save(
        folder / "tokenizer.json"
    )
    return folder


def test_the_processor_writes_a_placeholder_for_each_token(tokenizer):
    for settings in ({}, {"projector": "pixel_shuffle", "shuffle": 2}):
        model = create("diff-vlm-debug", tokenizer=tokenizer, **settings)
        processor = make_processor(model, tokenizer)
        pictures = [Image.new("RGB", size, "red") for size in ((40, 30), (20, 60))]
        question = {"type": "text", "text": "Is there a star?"}
        messages = [{"role": "user", "content": [{"type": "image", "image": pictures[0]}, question]}]
        inputs = processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )
        assert (inputs["input_ids"] == model.config.image_token_id).sum() == model.image_tokens
        assert inputs["pixel_values"].shape == (1, 3, *model.image_size)
        written = processor.tokenizer.decode(inputs["input_ids"][0])
        assert written.startswith("USER: <image>")
        assert written.endswith("<image>\nIs there a star? ASSISTANT:")
        with torch.no_grad():
            assert model(**inputs).logits.isfinite().all()
        both = processor(text=["<image> a", "<image> in the image"], images=pictures, padding=True, return_tensors="pt")
        assert both["attention_mask"][0, 0] == 0
        assert both["pixel_values"].shape[0] == 2


def test_a_processor_of_another_tokenizer(tokenizer):
    with pytest.raises(ValueError, match="image_token_id"):
        make_processor(create(), tokenizer)
    with pytest.raises(ValueError, match="tokens"):
        create(tokenizer=tokenizer, language_args={"vocab_size": 40})

"""Vision-language models: placeholders, padding, generation and folders."""

import json
import subprocess
import sys
from types import SimpleNamespace

import open_clip
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM

from diffvision.models import language as languages
from diffvision.models import vision_language_parts as parts
from diffvision.models.language.hugging_face import fast_tokenizer
from diffvision.models.vision_language import VisionLanguageConfig, create, make_processor
from diffvision.opening.vlm import check_processor, open_vlm


def small(name="vlm-debug", *, seed=0, **settings):
    """A model with large weights, whose likeliest tokens differ from position to position."""
    torch.manual_seed(seed)
    model = create(name, language_args={"vocab_size": 97, "max_length": 128, "tied": False}, **settings).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
        for parameter in [*model.language_model.model.layers.parameters(), *model.projector.parameters()]:
            if parameter.dim() == 2:
                parameter.normal_(std=0.2)
    return model


def text(model, *pieces):
    """A row of tokens: "image" for an image's placeholders, numbers for themselves."""
    place = [model.config.image_token_id] * model.image_tokens
    return torch.tensor([[token for piece in pieces for token in (place if piece == "image" else [piece])]])


MODELS = {
    "plain": {},
    "V2": {"name": "diff-vlm-debug"},
    "V1": {"name": "diff-vlm-debug", "language": "diff-debug", "projector": "pixel_shuffle", "shuffle": 2},
    "gated": {"tower": "gated_vit_debug", "feature_layer": -1},
    "OpenCLIP": {"tower": "DiffCLIP-debug", "feature_layer": -1},
}


@pytest.fixture(params=MODELS)
def model(request):
    return small(**MODELS[request.param])


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
    ("pieces", "images"), [((5, 6), 1), ((5, "image"), 0), (("image", "image", 5), 1), (("image", 4), 2)]
)
def test_images_without_placeholders_and_the_reverse(pieces, images):
    model = small()
    pixels = torch.zeros(images, 3, *model.image_size) if images else None
    with pytest.raises(ValueError, match="placeholders"):
        model(text(model, *pieces), pixels)


def test_a_placeholder_without_an_image_after_a_cache():
    model = small()
    cache = model(text(model, 5, 6), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="placeholders"):
        model(text(model, "image", 7), past_key_values=cache)


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
        ({"projector": "pixel_shuffle", "shuffle": 3}, "shuffle"),
        ({"tower": "vit_bsae_patch16_224"}, "vit_bsae_patch16_224"),
        ({"tower_args": {"depth": 1}}, "feature_layer"),
    ],
)
def test_settings_that_do_not_fit(settings, named):
    with pytest.raises(ValueError, match=named):
        create(**settings)


def test_pixel_shuffle_joins_squares_of_patches():
    projector = parts.Projector("pixel_shuffle", 3, 12, 2)
    with torch.no_grad():
        projector[0].weight.copy_(torch.eye(12))
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
    for settings in ({}, {"use_cache": False}):
        together = model.generate(
            padded, pixel_values=images, attention_mask=mask, max_new_tokens=6, do_sample=False, **settings
        )[:, longest:]
        assert together.tolist() == [row.tolist() for row in alone]
    beams = {"max_new_tokens": 3, "num_beams": 3, "do_sample": False}
    together = model.generate(padded, pixel_values=images, attention_mask=mask, **beams)[:, longest:]
    one = model.generate(rows[0], pixel_values=images[:2], **beams)[0, longest:]
    assert together[0].tolist() == one.tolist()


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


CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
OTHER_IMAGES = (  # as Gemma-3's, whose placeholder is another
    "{%- for message in messages %}{{ message.role + ':' }}{%- if message.content is string %}{{ message.content }}"
    "{% else %}{%- for part in message.content %}{{ '<start_of_image>' if part.type == 'image' else part.text }}"
    "{% endfor %}{% endif %}{{ eos_token }}{% endfor %}"
)


@pytest.mark.parametrize(("template", "ends"), [(CHATML, "<|im_end|>"), (OTHER_IMAGES, None), (None, None)])
def test_a_text_template_is_used_and_its_turns_end_generation(tokenizer, template, ends):
    fast = fast_tokenizer(tokenizer / "tokenizer.json", 400, 128)
    fast.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    fast.chat_template = template
    model = create("diff-vlm-debug", tokenizer=fast, language_args={"vocab_size": 400})
    processor = make_processor(model, fast)
    expected = [fast.eos_token_id, *([] if ends is None else [fast.convert_tokens_to_ids(ends)])]
    found = model.generation_config.eos_token_id
    assert (found if isinstance(found, list) else [found]) == expected
    question = [{"type": "image", "image": Image.new("RGB", (9, 9))}, {"type": "text", "text": "Is there a star?"}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert (inputs["input_ids"] == model.config.image_token_id).sum() == model.image_tokens


def test_a_processor_of_another_tokenizer(tokenizer):
    with pytest.raises(ValueError, match="image_token_id"):
        make_processor(create(), tokenizer)
    with pytest.raises(ValueError, match="tokens"):
        create(tokenizer=tokenizer, language_args={"vocab_size": 40})


def test_generated_length_is_checked_before_the_first_token():
    model = small()
    ids = text(model, "image")
    with pytest.raises(ValueError, match="context of 128"):
        model.generate(ids, pixel_values=torch.zeros(1, 3, *model.image_size), max_new_tokens=120)


def check_equal(opened, model):
    """Weights and buffers are equal, and so are logits, but for the alignment of memory that a file's tensors have."""
    given = dict([*model.named_parameters(), *model.named_buffers()])
    there = dict([*opened.named_parameters(), *opened.named_buffers()])
    assert there.keys() == given.keys()
    for name, value in given.items():
        assert torch.equal(there[name], value), name
    images, ids = torch.randn(1, 3, *model.image_size), text(model, 3, "image", 5)
    torch.testing.assert_close(opened(ids, images).logits, model(ids, images).logits)


def test_a_folder_opens_as_it_was(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path)
    opened = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(opened) is type(model)
    check_equal(opened, model)
    assert opened.config.to_diff_dict().keys() == model.config.to_diff_dict().keys()
    assert (tmp_path / "modeling_diffvision.py").read_text().startswith("from diffvision.models.vision_language import")


def test_a_tower_with_buffers_that_are_not_saved(tmp_path):
    model = small(tower="swin_tiny_patch4_window7_224", tower_args=SWIN)
    model.save_pretrained(tmp_path)
    opened = AutoModelForImageTextToText.from_pretrained(tmp_path)
    names = [name for name, _ in model.tower.named_buffers() if name not in model.tower.state_dict()]
    assert names
    check_equal(opened, model)


SWIN = {"img_size": 32, "embed_dim": 16, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4}


@pytest.mark.parametrize("change", ["missing", "unexpected", "size"])
def test_weights_of_another_model(tmp_path, change):
    small().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    if change == "missing":
        del state["projector.0.weight"]
    elif change == "unexpected":
        state["projector.4.weight"] = torch.zeros(3)
    else:
        state["projector.2.weight"] = torch.zeros(8, 64)
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="weights of"):
        AutoModelForImageTextToText.from_pretrained(tmp_path)


def test_gradient_checkpointing_gives_the_same_gradients(model):
    model.train()
    images, ids = torch.randn(1, 3, *model.image_size), text(model, 3, "image", 5, 6)
    gradients = []
    for enable in (False, True):
        if enable:
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing
        model.zero_grad()
        model(ids, images, labels=ids.masked_fill(ids == model.config.image_token_id, -100)).loss.backward()
        gradients.append({name: value.grad for name, value in model.named_parameters() if value.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert any(name.startswith("tower.") for name in gradients[0])
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value)


@pytest.fixture
def llama(tmp_path):
    """The folder of a small Llama of transformers."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_a_language_model_of_transformers(llama, tmp_path):
    model = create(language=f"hf:{llama}").eval()
    theirs = LlamaForCausalLM.from_pretrained(llama)
    ids = torch.randint(1, 97, (2, 7))
    torch.testing.assert_close(model(ids).logits, theirs(ids).logits)
    model.save_pretrained(tmp_path / "vlm")
    check_equal(AutoModelForImageTextToText.from_pretrained(tmp_path / "vlm"), model)
    test_generation_with_padding_and_cache(model)
    with pytest.raises(ValueError, match="language_args"):
        create(language=f"hf:{llama}", language_args={"depth": 2})


def test_a_saved_language_model_of_ours(tmp_path):
    theirs = languages.create("diffv2-debug", vocab_size=97).eval()
    languages.save(theirs, tmp_path)
    model = create("diff-vlm-debug", language=f"local-dir:{tmp_path}").eval()
    ids = torch.randint(1, 97, (2, 7))
    torch.testing.assert_close(model(ids).logits, theirs(ids))


def test_weights_of_a_tower(tmp_path):
    tower = parts.create_tower("diff_vit_debug", {"num_classes": 5})
    about = {"model": "diff_vit_debug", "preprocess": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}}
    save_file(tower.state_dict(), tmp_path / "tower.safetensors", metadata={"diffvision": json.dumps(about)})
    model = create("diff-vlm-debug", tower_pretrained=str(tmp_path / "tower.safetensors"))
    assert torch.equal(model.tower.blocks[0].mlp.fc1.weight, tower.blocks[0].mlp.fc1.weight)
    assert model.config.preprocess["mean"] == [0.1, 0.2, 0.3]

    clip = open_clip.create_model("DiffCLIP-debug", load_weights=False)
    save_file(clip.state_dict(), tmp_path / "clip.safetensors")
    model = create(tower="DiffCLIP-debug", tower_pretrained=str(tmp_path / "clip.safetensors"))
    assert torch.equal(model.tower.blocks[0].mlp.fc1.weight, clip.visual.trunk.blocks[0].mlp.fc1.weight)

    for source, named in ((tmp_path / "clip.safetensors", "plain_vit_debug"), ("laion2b", "laion2b")):
        with pytest.raises(ValueError, match=named):
            create(tower_pretrained=str(source))


def test_a_tag_of_a_tower_is_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").write_text("no weights")
    weights = timm.create_model("diff_vit_debug", pretrained=True).blocks[0].mlp.fc1.weight
    model = create("diff-vlm-debug", tower="diff_vit_debug", tower_pretrained="digits")
    assert torch.equal(model.tower.blocks[0].mlp.fc1.weight, weights)


def test_open_vlm(tokenizer, tmp_path):
    model = create("diff-vlm-debug", tokenizer=tokenizer)
    processor = make_processor(model, tokenizer)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="processor"):
        open_vlm(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    opened = open_vlm(str(tmp_path / "model"))
    check_equal(opened.model, model.eval())
    assert opened.name == "model"
    inputs = {"text": "<image> Is there a star?", "images": Image.new("RGB", (50, 20), "red"), "return_tensors": "pt"}
    for name, value in processor(**inputs).items():
        assert torch.equal(opened.processor(**inputs)[name], value)
    other = create("diff-vlm-debug", tokenizer=tokenizer, projector="pixel_shuffle", shuffle=2)
    make_processor(other, tokenizer).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="another model"):
        open_vlm(tmp_path / "model")
    images_of_another_kind = SimpleNamespace(image_processor=SimpleNamespace(), tokenizer=None)
    with pytest.raises(ValueError, match="another model"):
        check_processor(model, images_of_another_kind, "a folder")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_vlm(tmp_path / "nowhere")


FOLDER = """
import sys
from PIL import Image
IMPORT
from transformers import AutoModelForImageTextToText, AutoProcessor
processor = AutoProcessor.from_pretrained(sys.argv[1])
model = AutoModelForImageTextToText.from_pretrained(sys.argv[1], TRUST)
inputs = processor(text="<image> star", images=Image.new("RGB", (9, 9)), return_tensors="pt")
print(type(model).__name__, model.generate(**inputs, max_new_tokens=2, do_sample=False).shape[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("first", "trust"), [("import diffvision", ""), ("", "trust_remote_code=True")])
def test_the_folder_in_another_process(tokenizer, tmp_path, first, trust):
    model = create("diff-vlm-debug", tokenizer=tokenizer)
    model.save_pretrained(tmp_path)
    make_processor(model, tokenizer).save_pretrained(tmp_path)
    code = FOLDER.replace("IMPORT", first).replace("TRUST", trust)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "VisionLanguageModel" in done.stdout, done.stderr


PARTS = {"tower": 303_507_456, "projector": 20_979_712, "language_model": 6_738_415_616}
"""CLIP-L/14-336 (openai/clip-vit-large-patch14-336), LLaVA-1.5's two layers, Vicuna-7B (of 32,000 tokens): 7.06B."""


@pytest.mark.parametrize(("name", "more"), [("llava-1.5-7b", 0), ("diff-llava-1.5-7b", 1e-4)])
def test_the_sizes_of_llava(name, more):
    with torch.device("meta"):
        model = create(name)
    assert model.image_tokens == 576
    for part, published in PARTS.items():
        count = sum(parameter.numel() for parameter in getattr(model, part).parameters())
        assert published <= count <= published * (1 + more), part
    assert round(model.num_parameters() / 1e9, 2) == 7.06


def test_towers_of_openclips_own_classes():
    words = {"width": 32, "heads": 2, "layers": 1, "vocab_size": 9, "context_length": 4}
    images = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 3, "head_width": 8}
    vit = open_clip.CLIP(embed_dim=16, vision_cfg=images, text_cfg=words).visual.eval()
    picture = torch.randn(2, 3, 32, 32)
    _, found = vit.transformer.forward_intermediates(vit._embeds(picture), indices=[1, 2])
    for layer, expected in ((-1, vit.ln_post(found[1])), (-2, found[0])):
        assert parts.geometry(vit, layer) == ((32, 32), 8, 32)
        torch.testing.assert_close(parts.features(vit, picture, layer).flatten(2).mT, expected[:, 1:])
    resnet = open_clip.CLIP(embed_dim=16, vision_cfg={**images, "layers": [1, 1, 1, 1]}, text_cfg=words).visual
    with pytest.raises(ValueError, match="ModifiedResNet"):
        parts.geometry(resnet, -1)

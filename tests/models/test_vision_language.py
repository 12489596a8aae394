"""Vision-language models: placeholders, padding, generation and folders."""

import json
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import open_clip
import pytest
import timm
import torch
from language_fixtures import make_llama
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, LlamaForCausalLM

from diffvision.models.language.hugging_face import fast_tokenizer
from diffvision.models.vision_language import create, make_processor
from diffvision.opening.vlm import check_processor, open_vlm

EARLIER = json.loads((Path(__file__).parents[1] / "assets/vision_language.json").read_text())
"""What the weights of `drawn` computed in the model that was here before transformers' Llava."""


def small(name="vlm-debug", **settings):
    torch.manual_seed(0)
    return create(name, language_args={"vocab_size": 97, "max_length": 128, "tied": False}, **settings).eval()


def draw(name, shape):
    """Return weights that depend on their name alone."""
    value = torch.from_numpy(np.random.default_rng(zlib.crc32(name.encode())).standard_normal(tuple(shape))).float()
    if len(shape) > 1 and not name.endswith(("cls_token", "pos_embed")):
        return value * (1.0 if "embed_tokens" in name else 1.5 * int(np.prod(shape[1:])) ** -0.5)
    return 1 + 0.2 * value if "norm" in name and name.endswith("weight") else 0.3 * value


def drawn(model):
    for name, value in model.state_dict().items():
        value.copy_(draw(name, value.shape))
    return model


def text(model, *pieces):
    """A row of tokens: "image" for an image's placeholders, numbers for themselves."""
    place = [model.config.image_token_id] * model.image_tokens
    return torch.tensor([[token for piece in pieces for token in (place if piece == "image" else [piece])]])


MODELS = {
    "plain": {},
    "V2": {"name": "diff-vlm-debug"},
    "V1": {"name": "diff-vlm-debug", "language": "diff-debug", "projector": "pixel_shuffle", "shuffle": 2},
    "DiffCLIP": {"tower": "diff_vit_debug_clip", "feature_layer": -1, "language": "diffv2-debug"},
    "gated tower": {"tower": "gated_vit_debug", "feature_layer": -1, "shuffle": 2},
}


@pytest.fixture(params=MODELS)
def model(request):
    return drawn(small(**MODELS[request.param]))


@pytest.mark.parametrize("kind", MODELS)
def test_outputs_are_those_of_the_model_before_llava(kind):
    """Logits of padded rows with two images and one, loss, gradients, greedy tokens with each cache, and beams."""
    model, earlier = drawn(small(**MODELS[kind])), EARLIER[kind]
    rows = [text(model, 5, "image", 7, "image", 9), text(model, "image", 3)]
    longest = rows[0].shape[1]
    ids = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
    mask = torch.tensor([[0] * (longest - row.shape[1]) + [1] * row.shape[1] for row in rows])
    inputs = {"input_ids": ids, "pixel_values": draw("images", (3, 3, *model.image_size)), "attention_mask": mask}
    output = model(**inputs, labels=ids.masked_fill((ids == model.config.image_token_id) | (mask == 0), -100))
    output.loss.backward()
    for row, places in enumerate(([0, -3, -1], [-3, -1])):
        expected = torch.tensor(earlier["logits"][row])
        torch.testing.assert_close(output.logits[row, places], expected, rtol=1e-5, atol=1e-5)
    assert output.loss.item() == pytest.approx(earlier["loss"], rel=1e-6)
    gradients = {name: p.grad.norm().item() for name, p in model.named_parameters() if name in earlier["gradients"]}
    assert gradients == pytest.approx(earlier["gradients"], rel=1e-4)
    for settings in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False, **settings)[:, longest:]
        assert tokens.tolist() == earlier["tokens"]
    beams = model.generate(**inputs, max_new_tokens=3, do_sample=False, num_beams=3)[:, longest:]
    assert beams.tolist() == earlier["beams"]


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


@pytest.mark.parametrize(("template", "ends"), [(CHATML, ["<|im_end|>"]), (None, [])])
def test_a_text_template_is_used_and_its_turns_end_generation(tokenizer, template, ends):
    fast = fast_tokenizer(tokenizer / "tokenizer.json", 400, 128)
    fast.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    fast.chat_template = template
    model = create("diff-vlm-debug", tokenizer=fast, language_args={"vocab_size": 400})
    processor = make_processor(model, fast)
    found = model.generation_config.eos_token_id
    expected = [fast.eos_token_id, *fast.convert_tokens_to_ids(ends)]
    assert (found if isinstance(found, list) else [found]) == expected
    question = [{"type": "image", "image": Image.new("RGB", (9, 9))}, {"type": "text", "text": "Is there a star?"}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert (inputs["input_ids"] == model.config.image_token_id).sum() == model.image_tokens


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
    assert opened.config.to_dict().keys() == model.config.to_dict().keys()
    assert (tmp_path / "modeling_timm_llava.py").read_text().startswith("from diffvision.models.timm_llava import")


def test_a_tower_with_buffers_that_are_not_saved(tmp_path):
    sizes = {"img_size": 32, "embed_dim": 16, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4}
    model = small(tower="swin_tiny_patch4_window7_224", tower_args=sizes)
    model.save_pretrained(tmp_path)
    assert [1 for name, _ in model.vision_tower.named_buffers() if name not in model.vision_tower.state_dict()]
    check_equal(AutoModelForImageTextToText.from_pretrained(tmp_path), model)


@pytest.mark.parametrize(
    ("name", "value"),
    [("linear_1.weight", None), ("linear_3.weight", torch.zeros(3)), ("linear_2.weight", torch.zeros(8, 64))],
)
def test_weights_of_another_model_are_refused(name, value, tmp_path):
    """One is missing, unknown or of another size."""
    small().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file) | {f"multi_modal_projector.{name}": value}
    save_file({key: one for key, one in state.items() if one is not None}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=tmp_path.name):
        open_vlm(tmp_path)


@pytest.fixture
def llama(tmp_path):
    """The folder of a small Llama of transformers."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    make_llama("Llama", vocab_size=97, **sizes).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_a_language_model_of_transformers(llama, tmp_path):
    model = create(language=f"hf:{llama}").eval()
    theirs = LlamaForCausalLM.from_pretrained(llama)
    ids = torch.randint(1, 97, (2, 7))
    torch.testing.assert_close(model(ids).logits, theirs(ids).logits)
    model.save_pretrained(tmp_path / "vlm")
    check_equal(AutoModelForImageTextToText.from_pretrained(tmp_path / "vlm"), model)
    with pytest.raises(ValueError, match="language_args"):
        create(language=f"hf:{llama}", language_args={"depth": 2})


def test_weights_of_a_tower(tmp_path):
    tower = timm.create_model("diff_vit_debug", num_classes=5)
    about = {"model": "diff_vit_debug", "preprocess": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}}
    save_file(tower.state_dict(), tmp_path / "tower.safetensors", metadata={"diffvision": json.dumps(about)})
    model = create("diff-vlm-debug", tower_pretrained=str(tmp_path / "tower.safetensors"))
    assert torch.equal(model.vision_tower.timm_model.blocks[0].mlp.fc1.weight, tower.blocks[0].mlp.fc1.weight)
    assert model.config.preprocess["mean"] == [0.1, 0.2, 0.3]

    clip = open_clip.create_model("DiffCLIP-debug", load_weights=False)
    save_file(clip.state_dict(), tmp_path / "clip.safetensors")
    model = create(tower="diff_vit_debug_clip", tower_pretrained=str(tmp_path / "clip.safetensors"))
    assert torch.equal(
        model.vision_tower.timm_model.blocks[0].mlp.fc1.weight, clip.visual.trunk.blocks[0].mlp.fc1.weight
    )

    for source, named in ((tmp_path / "clip.safetensors", "plain_vit_debug"), ("laion2b", "laion2b")):
        with pytest.raises(ValueError, match=named):
            create(tower_pretrained=str(source))


def test_a_tag_of_a_tower_is_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").write_text("no weights")
    weights = timm.create_model("diff_vit_debug", pretrained=True).blocks[0].mlp.fc1.weight
    model = create("diff-vlm-debug", tower="diff_vit_debug", tower_pretrained="digits")
    assert torch.equal(model.vision_tower.timm_model.blocks[0].mlp.fc1.weight, weights)


def test_a_folder_is_opened_with_its_processor(tokenizer, tmp_path):
    model = create("diff-vlm-debug", tokenizer=tokenizer)
    processor = make_processor(model, tokenizer)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="processor"):
        open_vlm(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    opened = open_vlm(str(tmp_path / "model"))
    check_equal(opened.module, model.eval())
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
    with pytest.raises(ValueError, match="no_tower"):
        create(tower="no_tower")


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
    assert "TimmLlava" in done.stdout, done.stderr


PARTS = {"vision_tower": 303_507_456, "multi_modal_projector": 20_979_712, "language_model": 6_738_415_616}
"""CLIP-L/14-336 (openai/clip-vit-large-patch14-336), LLaVA-1.5's two layers, Vicuna-7B (of 32,000 tokens): 7.06B."""


@pytest.mark.quick("diff-llava-1.5-7b-0.0001")
@pytest.mark.parametrize(("name", "more"), [("llava-1.5-7b", 0), ("diff-llava-1.5-7b", 1e-4)])
def test_the_sizes_of_llava(name, more):
    with torch.device("meta"):
        model = create(name)
    assert model.image_tokens == 576
    for part, published in PARTS.items():
        count = sum(parameter.numel() for parameter in getattr(model, part).parameters())
        assert published <= count <= published * (1 + more), part
    assert round(model.num_parameters() / 1e9, 2) == 7.06

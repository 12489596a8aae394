"""`open_model`: the whole grammar, each library, weights from everywhere, and what is refused."""

import argparse
import dataclasses
import sys
from dataclasses import replace
from pathlib import Path

import open_clip
import pytest
import safetensors.torch
import timm
import torch
from language_fixtures import make_llama

from diffvision.comparison.entries import read_entries
from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.export.card import model_card
from diffvision.export.export_commands import export
from diffvision.export.model_folders import save_folder
from diffvision.inspection.inspecting import _lead
from diffvision.models import language
from diffvision.models.architecture import architecture
from diffvision.models.bundled import bundled
from diffvision.models.checkpoint import read_checkpoint
from diffvision.opening import best_checkpoint, find_run, open_model, open_native, split_label
from diffvision.opening.specs import as_text, find_model
from diffvision.opening.texts import HuggingFaceTokenizer
from diffvision.training.classification import ClassificationModule
from diffvision.training.clip import ContrastiveModule

NAME = "DiffCLIP-debug"


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(1)
    return open_clip.create_model(NAME)


def same(model, other):
    state = other.state_dict()
    return all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def prefixed(state, prefix):
    return {f"{prefix}{key}": value for key, value in state.items()}


def run_checkpoint(state, prefix="model.", **more):
    return {"pytorch-lightning_version": "2.6.6", "state_dict": prefixed(state, prefix), "epoch": 3, **more}


LAYOUTS = {
    # how a file is written: (content for a state_dict, whether its weights are averages)
    "weights.pt": (lambda state: state, False),
    "weights.safetensors": (lambda state: state, False),
    "epoch_1.pt": (lambda state: {"epoch": 1, "state_dict": prefixed(state, "module."), "optimizer": {}}, False),
    "last.ckpt": (run_checkpoint, False),
    "compiled.ckpt": (lambda state: run_checkpoint(state, "model._orig_mod."), False),
    "averaged.ckpt": (lambda state: run_checkpoint(state, current_model_state={}), True),
    "model.pth": (
        lambda state: {"arch": "x", "state_dict": dict.fromkeys(state, state["logit_scale"]), "state_dict_ema": state},
        True,
    ),
    "last.pth.tar": (lambda state: {"state_dict": state, "args": argparse.Namespace(lr=1, betas=[0.9, 0.98])}, False),
}


@pytest.mark.parametrize("file", LAYOUTS)
def test_a_file_of_any_layout_opens_on_a_name(file, tmp_path, trained):
    """And averaged weights are noted wherever they are shown."""
    write, is_average = LAYOUTS[file]
    save = safetensors.torch.save_file if file.endswith(".safetensors") else torch.save
    save(write(trained.state_dict()), tmp_path / file)
    model = open_model(NAME, str(tmp_path / file))
    assert same(model.module, trained)
    assert ("(EMA)" in model.average_note) == is_average
    assert ("(EMA)" in _lead([model])) == is_average  # of the page of `inspect`
    assert ("(EMA)" in model_card(model)) == is_average


def test_averages_and_classes_of_a_file_of_timm_s(tmp_path):
    model = timm.create_model("diff_vit_debug", num_classes=7)
    state = {key: value + 1 for key, value in model.state_dict().items()}
    torch.save({"arch": "x", "state_dict": state, "state_dict_ema": model.state_dict()}, tmp_path / "model.pth")
    loaded = open_model("diff_vit_debug", tmp_path / "model.pth", preprocess={"mean": [0.1, 0.2, 0.3]})
    assert loaded.tokenizer is None
    assert same(loaded.module, model)
    assert "(EMA)" in loaded.average_note
    assert "0.1000, 0.2000, 0.3000" in str(loaded.transform)


def test_training_run_with_its_preprocessing(tmp_path, trained):
    path = tmp_path / "last.ckpt"
    kept = {"mean": [0.485, 0.456, 0.406], "std": [0.2, 0.2, 0.2], "size": (32, 32), "interpolation": "bilinear"}
    about = {"model": NAME, "preprocess": kept, "architecture": architecture(trained)}
    torch.save(run_checkpoint(trained.state_dict(), diffvision=about), path)
    loaded = open_model(NAME, path)
    assert same(loaded.module, trained)
    assert tuple(loaded.transform.transforms[-1].mean) == (0.485, 0.456, 0.406)
    assert "bilinear" in str(loaded.transform)
    other = open_model(NAME, path, preprocess={"mean": [0.0, 0.0, 0.0]})  # what the caller says comes first
    assert tuple(other.transform.transforms[-1].mean) == (0.0, 0.0, 0.0)
    assert tuple(other.transform.transforms[-1].std) == (0.2, 0.2, 0.2)
    with pytest.raises(ValueError, match="is of the model 'DiffCLIP-debug'"):
        open_model("CLIP-debug", path)


def test_files_that_cannot_be_used(tmp_path, trained):
    path = tmp_path / "weights.pt"
    torch.save(trained.state_dict(), path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged or no checkpoint"):
        open_model(NAME, path)
    torch.save({"epoch": 3}, path)
    with pytest.raises(ValueError, match="holds no tensors by name"):
        read_checkpoint(path)


def test_weights_of_siglip_open_on_a_name_without_its_bias(tmp_path):
    """As those of a run do: the bias is training's, not the name's."""
    siglip = open_clip.create_model(NAME, init_logit_bias=-10.0)
    torch.save(siglip.state_dict(), tmp_path / "siglip.pt")
    opened = open_model(NAME, tmp_path / "siglip.pt")
    assert same(opened.module, siglip)
    with pytest.raises(ValueError, match="set loss to siglip"):
        ContrastiveModule(NAME, pretrained=str(tmp_path / "siglip.pt"))
    assert same(ContrastiveModule(NAME, pretrained=str(tmp_path / "siglip.pt"), loss="siglip").model, siglip)


MISFITS = {
    "positional_embedding": torch.zeros(77, 3),  # OpenCLIP: AssertionError
    "logit_bias": torch.zeros(3),  # AttributeError
    "strange": torch.zeros(1),
}


@pytest.mark.parametrize("name", [*MISFITS, "token_embedding.weight"])
def test_weights_that_do_not_fit_are_one_sentence_everywhere(name, tmp_path, trained):
    path, state = tmp_path / "weights.pt", dict(trained.state_dict())
    torch.save(
        {**state, name: MISFITS[name]} if name in MISFITS else {k: v for k, v in state.items() if k != name}, path
    )
    for load in (lambda: open_model(NAME, path), lambda: ContrastiveModule(NAME, pretrained=str(path))):
        with pytest.raises(ValueError, match=r"weights\.pt"):
            load()


def test_a_classifier_that_does_not_fit_is_one_sentence(tmp_path):
    path = tmp_path / "weights.pt"
    for head in (torch.zeros(()), torch.zeros(10), torch.zeros(10, 3)):
        torch.save({**timm.create_model("diff_vit_debug", num_classes=10).state_dict(), "head.weight": head}, path)
        with pytest.raises(ValueError, match=r"weights\.pt"):
            open_model("diff_vit_debug", path)
        with pytest.raises(ValueError, match=r"weights\.pt"):
            ClassificationModule("diff_vit_debug", num_classes=10, model_args={"checkpoint_path": str(path)})


# ---- the grammar ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def house(tmp_path_factory, trained):
    """A folder with a model of each kind in it."""
    folder = tmp_path_factory.mktemp("house")
    config = open_clip.get_model_config(NAME)
    about = {"model": NAME, "preprocess": {"mean": [0.1, 0.2, 0.3]}, "architecture": architecture(trained)}
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "run" / "config.yaml").write_text("seed_everything: 0")
    torch.save(run_checkpoint(trained.state_dict(), diffvision=about), folder / "run" / "checkpoints" / "last.ckpt")
    torch.save(trained.state_dict(), folder / "bare.pt")
    save_folder(trained, folder / "clip", config=config)
    save_folder(timm.create_model("diff_vit_debug", num_classes=3), folder / "vit", config={})
    words = train_tokenizer(["a cat and a dog"], 300)
    text = language.create("diff-debug", vocab_size=300, max_length=64)
    language.save(text, folder / "text", words)
    about = {"model": "diff-debug", "tokenizer": str(folder / "text")}
    config = {"config": dataclasses.asdict(text.config)}
    torch.save(run_checkpoint(text.state_dict(), diffvision=about, hyper_parameters=config), folder / "text.ckpt")
    export(str(folder / "text"), str(folder / "exported"))
    sizes = {"vocab_size": 300, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64}
    make_llama("Llama", **sizes).save_pretrained(folder / "llama")
    return folder


KINDS = {
    # spec: (kind, library, name, weights)
    NAME: ("name", "open_clip", NAME, None),
    "diff_vit_debug": ("name", "timm", "diff_vit_debug", None),
    "diff-debug": ("name", "language", "diff-debug", None),
    "run/checkpoints/last.ckpt": ("file", "open_clip", NAME, "run/checkpoints/last.ckpt"),
    "run": ("run", "open_clip", NAME, "run/checkpoints/last.ckpt"),
    "text.ckpt": ("file", "language", "diff-debug", "text.ckpt"),
    "clip": ("folder", "open_clip", "clip", "clip"),
    "vit": ("folder", "timm", "diff_vit_debug", "vit"),
    "text": ("folder", "language", "diff-debug", "text"),
}


@pytest.mark.parametrize("spec", KINDS)
def test_a_line_of_text_names_a_model(spec, house, monkeypatch):
    monkeypatch.chdir(house)
    kind, library, name, weights = KINDS[spec]
    model = open_model(spec)
    assert (find_model(spec).kind, model.library, model.name, model.weights) == (kind, library, name, weights)
    assert not model.module.training
    assert (model.transform is None) == model.is_language == (library == "language")
    assert (model.tokenizer is None) == (library == "timm" or spec == "diff-debug")
    assert model.max_length == ({"diff-debug": 2048}.get(spec, 64) if model.is_language else None)
    assert model.run == (house / "run" if "run" in spec else None)
    if library == "open_clip" and weights:
        mean = (0.1, 0.2, 0.3) if "run" in spec else open_clip.OPENAI_DATASET_MEAN
        assert tuple(model.transform.transforms[-1].mean) == mean


@pytest.mark.parametrize(
    ("spec", "library", "kind", "name"),
    [
        ("exported", "language", "LanguageModel", "diff-debug"),
        ("hf:exported", "transformers", "DiffLlamaForCausalLM", "exported"),
        ("llama", "transformers", "LlamaForCausalLM", "llama"),
        ("hf:llama", "transformers", "LlamaForCausalLM", "llama"),
    ],
)
def test_a_transformers_folder_says_what_it_is(spec, library, kind, name, house, monkeypatch):
    monkeypatch.chdir(house)
    model = open_model(spec)
    assert (model.library, type(model.module).__name__, model.name, model.max_length) == (library, kind, name, 64)
    assert (model.tokenizer is None) == ("llama" in spec)
    if model.tokenizer is not None:
        assert model.tokenizer.encode("a cat") == open_model("text").tokenizer.encode("a cat")


def test_a_name_wins_over_a_path_of_the_same_spelling(house, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "diff_vit_debug").symlink_to(house / "vit")
    (tmp_path / "vit_tiny_patch16_224.ckpt").symlink_to(house / "run" / "checkpoints" / "last.ckpt")
    assert open_model("diff_vit_debug").weights is None
    assert open_model("./diff_vit_debug").weights == "./diff_vit_debug"
    assert open_model(Path("diff_vit_debug")).weights == "diff_vit_debug"
    assert open_model("vit_tiny_patch16_224.ckpt").name == NAME  # no tag of timm's is called ckpt


@pytest.mark.parametrize("obstacle", ["vit", "run"])
@pytest.mark.parametrize(("name", "tag"), [("diff_vit_debug", "digits"), ("diffv2-nano", "stdlib")])
def test_a_tag_is_no_path(name, tag, obstacle, house, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (name, f"{name}.{tag}"):
        Path(path).symlink_to(house / obstacle)
    file = bundled(name)[tag]
    expected = (open_model(file) if file.is_dir() else open_model(name, file)).module
    for opened in (open_model(f"{name}.{tag}"), open_native(f"{name}.{tag}")):
        assert same(opened.module, expected)
        assert opened.name == name
        assert opened.run is None
    assert read_entries([f"{name}.{tag}", f"./{name}.{tag}"])[0].model == f"{name}.{tag}"
    export(f"{name}.{tag}", str(tmp_path / "exported"))
    assert same(open_model(tmp_path / "exported").module, expected)


def test_labels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert split_label("V1=runs/a/last.ckpt") == ("V1", "runs/a/last.ckpt")
    assert split_label("runs/a/last.ckpt") == ("last", "runs/a/last.ckpt")
    assert split_label("hf:meta/llama") == ("llama", "hf:meta/llama")
    assert split_label("L=hf:meta/llama") == ("L", "hf:meta/llama")
    assert as_text(Path("digits")) == "./digits"  # a path even where a model has its name
    assert split_label("runs/epoch=3-step=100.ckpt") == ("epoch=3-step=100", "runs/epoch=3-step=100.ckpt")
    Path("epoch=3.ckpt").write_text("")
    assert split_label("epoch=3.ckpt") == ("epoch=3", "epoch=3.ckpt")
    assert split_label(".") == ("model", ".")
    for spec in ("V1/0.8=epoch=3.ckpt", "V1:0.8=CLIP-debug", "a/b=hf:meta/llama"):
        with pytest.raises(ValueError, match=r"^the label '.*' of .* has a '[/:]'"):
            split_label(spec)
    for label in ("", ".."):
        with pytest.raises(ValueError, match="use LABEL="):
            split_label(f"{label}=x.ckpt")


def test_a_run_is_its_best_checkpoint_or_the_last(tmp_path):
    run = tmp_path / "out" / "fit" / "version_0"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("")
    torch.save({}, run / "checkpoints" / "best.ckpt")
    state = {"monitor": "val/acc1", "best_model_path": "/elsewhere/best.ckpt", "best_model_score": torch.tensor(0.5)}
    content = {"global_step": 1234, "callbacks": {"ModelCheckpoint{'monitor': ...}": state}}
    torch.save(content, run / "checkpoints" / "last.ckpt")
    torch.save({}, run / "checkpoints" / "copied.ckpt")  # the newest by its time, without a score
    assert best_checkpoint(run) == (run / "checkpoints" / "best.ckpt", "best val/acc1 0.5000")
    (run / "checkpoints" / "copied.ckpt").unlink()
    for folder in (run, tmp_path / "out", tmp_path):
        assert find_run(folder) == run
    (tmp_path / "out" / "fit" / "version_1" / "checkpoints").mkdir(parents=True)
    (tmp_path / "out" / "fit" / "version_1" / "config.yaml").write_text("")
    assert find_run(tmp_path / "out") == run  # the other was never trained
    (run / "checkpoints" / "best.ckpt").unlink()
    assert best_checkpoint(run) == (run / "checkpoints" / "last.ckpt", "last, step 1,234")
    (run / "checkpoints" / "last.ckpt").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"last\.ckpt cannot be read"):
        best_checkpoint(run)
    assert find_run(tmp_path / "none") is None
    (tmp_path / "config.json").write_text("{}")
    assert find_run(tmp_path) is None  # the folder of a model


def test_names_with_weights(house, monkeypatch):
    monkeypatch.chdir(house)
    text = open_model("diff-debug", "text.ckpt")
    assert (text.name, text.weights) == ("diff-debug", "text.ckpt")
    assert text.tokenizer.vocab_size <= 300
    assert open_model("diff-debug", "text").weights == "text"


@pytest.mark.parametrize(
    ("spec", "settings", "error", "message"),
    [
        ("runs/none.ckpt", {}, FileNotFoundError, "runs/none.ckpt"),
        (Path("vit_tiny_patch16_224"), {}, FileNotFoundError, "vit_tiny_patch16_224"),
        ("", {}, ValueError, "model"),
        ("local-dir:vit", {}, ValueError, "give vit"),
        ("runs", {}, ValueError, r"\(runs/a, runs/b\)"),
        ("runs/a", {}, ValueError, "runs/a"),
        ("bare.pt", {}, ValueError, "--checkpoint bare.pt"),
        ("diff_vit_debg", {}, ValueError, "diff_vit_debug"),
        ("vit_tiny_patch16_224.nonsense", {}, ValueError, "augreg_in21k"),
        ("ViT-B-32.laion9", {}, ValueError, "openai"),
        ("dint_vit_debug.in1k", {}, ValueError, "none"),
        ("https://example.org/x.ckpt", {}, ValueError, "URLs"),
        ("text", {"checkpoint": "text.ckpt"}, ValueError, "checkpoint"),
        ("diff_vit_debug.digits", {"checkpoint": "bare.pt"}, ValueError, "checkpoint"),
        (NAME, {"checkpoint": "https://example.org/x.ckpt"}, ValueError, "URLs"),
        (NAME, {"checkpoint": "laion2b"}, FileNotFoundError, "laion2b"),
        ("diff_vit_debug", {"checkpoint": "digits"}, ValueError, r"diff_vit_debug\.digits"),
        ("diff-debug", {"checkpoint": "none.ckpt"}, FileNotFoundError, "none.ckpt"),
        ("CLIP-debug", {"checkpoint": "run/checkpoints/last.ckpt"}, ValueError, "DiffCLIP-debug"),
        ("transformer-debug", {"checkpoint": "text.ckpt"}, ValueError, "diff-debug"),
        ("transformer-debug", {"checkpoint": "text"}, ValueError, "diff-debug"),
        (NAME, {"preprocess": {"size": 3}}, ValueError, "preprocess"),
        ("clip", {"preprocess": {"mean": [0, "x", 0]}}, ValueError, r"preprocess\.mean"),
        ("text", {"preprocess": {"mean": [0, 0, 0]}}, ValueError, "preprocess"),
        ("clip", {"tokenizer": "text"}, ValueError, "tokenizer"),
        ("text", {"tokenizer": "large"}, ValueError, "tokenizer"),
    ],
)
def test_what_names_no_model_is_one_sentence(spec, settings, error, message, house, monkeypatch):
    monkeypatch.chdir(house)
    train_tokenizer([Path(__file__).read_text(encoding="utf-8")], 320).save("large/tokenizer.json")
    for run in ("runs/a", "runs/b"):
        Path(run, "checkpoints").mkdir(parents=True, exist_ok=True)
        Path(run, "config.yaml").write_text("")
    with pytest.raises(error, match=message):
        open_model(spec, **settings)


def test_a_tag_that_is_not_downloaded_is_one_sentence(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="augreg_in21k"):
        open_model("vit_tiny_patch16_224.augreg_in21k")


def test_models_of_the_other_kind_are_refused(house):
    text, clip = open_model(house / "text"), open_model(house / "clip")
    assert (text.for_text(), clip.for_images()) == (text, clip)
    with pytest.raises(ValueError, match="is a language model: give one"):
        text.for_images()
    with pytest.raises(ValueError, match="clip is a model of images"):
        clip.for_text()
    joint = replace(text, processor=object())
    for use in (joint.for_images, joint.for_text):
        with pytest.raises(ValueError, match="evaluate-vlm"):
            use()
    with pytest.raises(ValueError, match="diff-debug has new weights"):
        open_model("diff-debug").for_text()


def test_a_file_that_names_a_stranger(house, tmp_path):
    content = torch.load(house / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    for name in ("stranger", "hf:stranger", "https://example.org/x", "local-dir:elsewhere"):
        content["diffvision"]["model"] = name
        torch.save(content, tmp_path / "x.ckpt")
        with pytest.raises((ValueError, FileNotFoundError), match=f"x.ckpt is of the model '{name}'"):
            open_model(tmp_path / "x.ckpt")


# ---- transformers --------------------------------------------------------------------------------------------------


def test_transformers_missing_is_one_sentence(house, monkeypatch):
    monkeypatch.delitem(sys.modules, "diffvision.models.language.modeling_diffllama_v2", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="needs transformers"):
        open_model("hf:anything")


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>"])
def test_a_special_token_s_name_in_a_text_is_text(end, tmp_path):
    """As in our own tokenizers: bits per byte of the same text are of the same tokens."""
    transformers = pytest.importorskip("transformers")
    ours = train_tokenizer(["a cat and a dog"], 300)
    ours.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|endoftext|>", additional_special_tokens=["</s>"]
    )
    text = f"a cat{end} and a dog"
    ids = HuggingFaceTokenizer(theirs).encode(text)
    assert ids == ours.encode(text)
    assert ours.eos_id not in ids
    assert ours.decode(ids) == text

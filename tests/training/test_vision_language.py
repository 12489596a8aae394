"""Training of vision-language models: the loss against torch's, what is trained at which rate, stages, LoRA, DDP."""

import shutil

import lightning.pytorch as pl
import pytest
import torch
import training_fits
from PIL import Image
from torch._dynamo.utils import counters
from torch.nn import functional as F
from training_fits import Gradients, Rows, compile_with, same

from diffvision.cli import main
from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.opening.vlm import open_vlm
from diffvision.training.language import LanguageModule
from diffvision.training.optim import OptimizerSettings

pytest.importorskip("transformers")
import transformers

from diffvision.models.vision_language import load
from diffvision.training.vision_language import BARE_HEADS, PARTS, Lora, VisionLanguageModule

SETTINGS = OptimizerSettings(lr=1e-3, warmup_steps=0, decay="linear")
LENGTH, IMAGES = 40, 16  # tokens of the longest row, and of an image
VOCABULARY = 258  # and the placeholder, which is beyond it


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["a red star, a blue ring"], 258).save(folder / "tokenizer.json")
    return str(folder)


def train(module, *callbacks, data=None, **settings):
    return training_fits.train(module, *callbacks, data=data or Conversations(), **settings)


def make(tokenizer=None, name="vlm-debug", **settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "max_length": 64}
    return VisionLanguageModule(
        name, **{"language_args": sizes, "tokenizer": tokenizer, "optimizer": SETTINGS} | settings
    )


class Conversations(Rows):
    """Eight random ones of unequal lengths, with one image, two or none."""

    split, eval_batch_size = 4, 3

    def __init__(self, batch_size: int = 8, images=(1, 1, 2, 1, 0, 1, 1, 1)):
        super().__init__([])
        generator = torch.Generator().manual_seed(0)
        self.batch_size = batch_size
        for number, count in enumerate(images):
            text = torch.randint(0, VOCABULARY, (LENGTH - 2 - number,), generator=generator)
            text[1 : 1 + count * IMAGES] = VOCABULARY
            learned = torch.arange(len(text)) >= len(text) - 1 - number % 4
            image = torch.rand(count, 3, 32, 32, generator=generator)
            self.rows.append({"tokens": text, "learned": learned, "image": image})

    @staticmethod
    def collate(rows):
        pad = torch.nn.utils.rnn.pad_sequence
        batch = {key: pad([row[key] for row in rows], batch_first=True) for key in ("tokens", "learned")}
        return batch | {
            "image": torch.cat([row["image"] for row in rows]),
            "lengths": torch.tensor([len(row["tokens"]) for row in rows]),
        }


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "x.ckpt"
    train(make(tokenizer)).save_checkpoint(path)
    return path


def expected_gradients():
    """Of the mean over all learned tokens, from transformers' logits of each row alone, without padding."""
    model = make().model.double()
    nats, count = 0.0, 0
    for row in Conversations().rows:
        images = row["image"].double() if len(row["image"]) else None
        logits = model(row["tokens"][None], images).logits[0, :-1]
        learned = row["learned"][1:]
        nats += F.cross_entropy(logits[learned], row["tokens"][1:][learned], reduction="sum")
        count += int(learned.sum())
    (nats / count).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, nats / count


# --- the loss ---


@pytest.mark.parametrize("accumulated", [1, 4])
def test_a_step_has_the_mean_over_its_learned_tokens_in_whichever_batch_they_are(accumulated):
    kept, (expected, loss) = Gradients(), expected_gradients()
    data = Conversations(batch_size=8 // accumulated)
    validated = {"limit_val_batches": 1.0, "accumulate_grad_batches": accumulated, "log_every_n_steps": 1}
    trainer = train(make(), kept, data=data, precision="64-true", **validated)
    same(expected, kept.seen, rtol=1e-4, atol=1e-7)  # Llama normalises in float32
    assert trainer.callback_metrics["val/tokens"] == sum(int(row["learned"].sum()) for row in data.rows)
    if accumulated == 1:
        torch.testing.assert_close(trainer.logged_metrics["train/loss"].double(), loss, rtol=1e-6, atol=0)


HEADS = {
    "granite": {"logits_scaling": 8.0},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 0.1},
    "cohere": {"logit_scale": 0.0625},
    "phi": {},  # with a bias
    **{kind: {} for kind in BARE_HEADS if kind != "diffllama_v2"},
}


def hugging_face(folder, kind, **settings):
    """Save a small model of an architecture of transformers; return its path."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 0}
    config = transformers.AutoConfig.for_model(
        kind, **sizes | heads | {"pad_token_id": 0, "bos_token_id": 0} | settings
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return f"hf:{folder}"


@pytest.mark.quick("granite", "gemma2", "phi")
@pytest.mark.parametrize("kind", HEADS)
def test_the_loss_is_that_of_the_models_own_logits(tmp_path, kind):
    module = make(language=hugging_face(tmp_path, kind, **HEADS[kind]), language_args=None).eval()
    assert module.returns_logits is (kind not in BARE_HEADS)
    assert any(layer.training for layer in make(language=f"hf:{tmp_path}", language_args=None).modules())
    batch = Conversations.collate(Conversations().rows)
    with torch.no_grad():
        _, nats, count = module.sum_losses(batch)
        logits, targets = module.model(batch["tokens"][:, :-1], batch["image"]).logits, batch["tokens"][:, 1:]
    learned = batch["learned"][:, 1:]
    expected = F.cross_entropy(logits[learned], targets[learned], reduction="sum")
    torch.testing.assert_close(nats, expected, rtol=1e-5, atol=0)
    assert count == learned.sum()


def test_recomputed_activations_change_nothing_and_a_batch_without_images_trains_every_part():
    plain, again = Gradients(), Gradients()
    train(make(), plain)
    train(make(grad_checkpointing=True), again)
    same(plain.seen, again.seen)
    train(make(), again, data=Conversations(images=[0] * 8))
    assert again.seen.keys() == plain.seen.keys()
    assert not any(gradient.any() for name, gradient in again.seen.items() if not name.startswith("language_model."))


# --- what is trained ---


@pytest.mark.parametrize("parts", ["projector", ["projector", "language_model"], ["tower"]])
def test_parts_that_are_not_trained_keep_their_weights_and_their_mode(parts):
    module = make(train=parts)
    chosen = {parts} if isinstance(parts, str) else {*parts}
    before = {name: value.clone() for name, value in module.model.named_parameters()}

    class Modes(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            self.seen = {part: {m.training for m in getattr(pl_module.model, PARTS[part]).modules()} for part in PARTS}

    train(module, modes := Modes(), max_steps=2, limit_val_batches=1.0, val_check_interval=1)
    assert modes.seen == {part: {part in chosen} for part in PARTS}
    changed = {name for name, value in module.model.named_parameters() if not torch.equal(value, before[name])}
    assert {name.partition(".")[0] for name in changed} == {PARTS[part] for part in chosen}
    assert {name for name, p in module.model.named_parameters() if p.grad is not None or p.requires_grad} == changed


def test_the_projector_has_its_rate():
    module = make(projector_lr=2e-3)
    trainer = train(module)
    groups = trainer.optimizers[0].param_groups
    names = {id(parameter): name.partition(".")[0] for name, parameter in module.model.named_parameters()}
    scales = {(names[id(p)], group["lr_scale"]) for group in groups for p in group["params"]}
    assert {part: pytest.approx(scale * 1e-3) for part, scale in scales} == {
        "multi_modal_projector": 2e-3,
        "vision_tower": 1e-3,
        "language_model": 1e-3,
    }
    assert len(scales) == 3


def test_what_no_feature_depends_on_is_not_trained():
    module = make()
    frozen = {name for name, p in module.model.named_parameters() if not p.requires_grad}
    tower = "vision_tower.timm_model"
    assert {name.split(".")[2] for name in frozen} == {"blocks", "norm"}
    assert all(name.startswith((f"{tower}.blocks.3.", f"{tower}.norm.")) for name in frozen)


# --- stages, checkpoints and adapters ---


def test_a_second_stage_begins_from_the_first_and_a_checkpoint_needs_no_other_file(tokenizer, tmp_path):
    first = make(tokenizer, train="projector")
    train(first).save_checkpoint(tmp_path / "x.ckpt")
    second = make(tokenizer, train="all", pretrained=str(tmp_path / "x.ckpt"))
    same(dict(first.model.state_dict()), dict(second.model.state_dict()), rtol=0, atol=0)
    loaded, about = load(tmp_path / "x.ckpt")
    same(dict(first.model.state_dict()), dict(loaded.state_dict()), rtol=0, atol=0)
    assert about["tokenizer"] == tokenizer
    assert not loaded.training
    again = VisionLanguageModule.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    same(dict(first.model.state_dict()), dict(again.model.state_dict()), rtol=0, atol=0)
    assert again.trained == ("projector",)
    assert again.processor.image_token_id == first.processor.image_token_id


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_args": {"projector": "pixel_shuffle", "shuffle": 2}}, "projector 'mlp' there"),
        ({"model_args": {"feature_layer": -1}}, "vision_feature_layer -2 there"),
        ({"name": "diff-vlm-debug"}, "is of another model, with"),
        ({"language_args": {"vocab_size": VOCABULARY, "max_length": 64, "mlp_dim": 100}}, "intermediate_size"),
    ],
)
def test_weights_of_another_model_are_refused(settings, message, tokenizer, checkpoint):
    with pytest.raises(ValueError, match=message):
        make(tokenizer, pretrained=str(checkpoint), **settings)
    with pytest.raises(ValueError, match=message):
        make(tokenizer, **settings).on_load_checkpoint(torch.load(checkpoint, weights_only=True))


def test_another_tokenizer_other_adapters_and_text_models_are_refused(tokenizer, checkpoint, tmp_path):
    module, content = make(tokenizer), torch.load(checkpoint, weights_only=True)
    module.on_load_checkpoint(content)
    train_tokenizer(["other other words words"], 258).save(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="tokenizer"):
        make(str(tmp_path)).on_load_checkpoint(content)
    with pytest.raises(ValueError, match=r"model\.lora"):
        make(tokenizer, lora={"r": 2}).on_load_checkpoint(content)
    text = LanguageModule("diff-debug", model_args={"vocab_size": VOCABULARY})
    with pytest.raises(ValueError, match="not of our vision-language"):
        module.on_load_checkpoint({"diffvision": text.describe()})
    torch.save({"state_dict": text.state_dict(), "pytorch-lightning_version": pl.__version__}, tmp_path / "y.ckpt")
    with pytest.raises(ValueError, match="not of our vision-language"):
        make(pretrained=str(tmp_path / "y.ckpt"))


def test_adapters_alone_are_trained_and_merge_where_a_checkpoint_is_opened_or_exported(tokenizer, tmp_path):
    pytest.importorskip("peft")
    settings = {"train": ["projector", "language_model"], "lora": {"r": 2, "alpha": 6}}
    module, path = make(tokenizer, name="diff-vlm-debug", **settings), tmp_path / "x.ckpt"
    trained = {name for name, p in module.model.named_parameters() if p.requires_grad}
    assert trained
    assert all(name.startswith("multi_modal_projector.") or ".lora_" in name for name in trained)
    train(module, max_steps=3, data=Conversations(batch_size=4)).save_checkpoint(path)
    assert any(p.any() for name, p in module.model.named_parameters() if ".lora_B." in name)
    assert load(path)[1]["lora"] == {"r": 2, "alpha": 6, "dropout": 0.0, "targets": "all-linear"}
    same(module.state_dict(), VisionLanguageModule.load_from_checkpoint(path).state_dict(), 0, 0)

    opened = open_vlm(path)
    assert (opened.name, opened.weights) == ("diff-vlm-debug", str(path))
    assert main(["export", str(path), str(tmp_path / "folder")]) == 0
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "folder").eval()
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "folder")
    question = {"text": "<image>\na ring?", "images": Image.new("RGB", (40, 30)), "return_tensors": "pt"}
    inputs = processor(**question)
    assert inputs.keys() == opened.processor(**question).keys()
    with torch.no_grad():
        expected, ours, exported = (m.eval()(**inputs).logits for m in (module.model, opened.module, theirs))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(exported, expected, rtol=1e-4, atol=1e-5)
    assert not any("lora" in name for name in opened.module.state_dict())
    assert make(name="diff-vlm-debug", pretrained=str(path)).lora is None
    again = make(tokenizer, name=f"local-dir:{tmp_path / 'folder'}", language_args=None)
    same(dict(theirs.state_dict()), dict(again.model.state_dict()), 0, 0)


def test_a_checkpoint_is_not_opened_with_another_tokenizer(checkpoint, tmp_path):
    shutil.copy(checkpoint, tmp_path / "x.ckpt")
    train_tokenizer(["other other words words"], 258).save(tmp_path / "tokenizer.json")  # comes before the recorded one
    with pytest.raises(ValueError, match="is not the tokenizer that"):
        open_vlm(tmp_path / "x.ckpt")
    (tmp_path / "tokenizer.json").unlink()
    content = torch.load(tmp_path / "x.ckpt", weights_only=True)
    content["diffvision"]["tokenizer"] = "elsewhere"
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        open_vlm(tmp_path / "x.ckpt")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_bad_settings_are_named(tokenizer, tmp_path):
    for settings, message in (
        ({"train": "towers"}, "train"),
        ({"train": ["tower"], "projector_lr": 1e-3}, "projector_lr must .*0.001"),
        ({"projector_lr": 0.0}, "projector_lr must .*0.0"),
        ({"train": "projector", "lora": Lora()}, "train must .*projector"),
        ({"lora": {"targets": ["nothing"]}}, "lora.targets.*nothing"),
        ({"lora": {"targets": ["q_proj", "lm_head"]}}, "lora.targets.*lm_head"),  # it would not be trained
        ({"lora": {"targets": ["embed_tokens"]}}, "lora.targets.*embed_tokens"),  # it would not be merged
        ({"name": "vlm-9q"}, "model 'vlm-9q'"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**settings)
    data = Conversations()
    data.length = 65
    with pytest.raises(ValueError, match="65"):
        train(make(), data=data)
    with pytest.raises(ValueError, match="tokenizer"):
        make().processor  # noqa: B018


@pytest.mark.slow
def test_a_compiled_run_is_the_eager_one(monkeypatch):
    compile_with(monkeypatch)
    eager, whole = make(), make(compile=True)
    train(eager, max_steps=3)
    counters.clear()
    train(whole, max_steps=3)
    assert counters["stats"]["unique_graphs"]
    assert not counters["graph_break"]
    torch.testing.assert_close(whole.model.state_dict(), eager.model.state_dict(), rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


# --- two processes ---


@pytest.mark.forks
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"train": ["projector", "language_model"], "lora": {"r": 2}}], ids=["all", "lora"]
)
def test_ddp_has_the_gradients_and_the_validation_of_one_process(settings, tmp_path):
    """The ranks' batches have unequal numbers of images and of learned tokens."""
    validated = {"limit_val_batches": 1.0, "accumulate_grad_batches": 2, "log_every_n_steps": 1, "precision": "64-true"}
    kept, data = Gradients(), Conversations(batch_size=4)
    one = train(make(**settings), kept, data=data, **validated)
    both = train(make(**settings), Gradients(tmp_path), data=data, devices=2, strategy="ddp_fork", **validated)
    for rank in (0, 1):
        same(kept.seen, torch.load(tmp_path / f"{rank}.pt", weights_only=True))
    for key in ("val/loss", "val/tokens", "train/loss"):
        torch.testing.assert_close(both.callback_metrics[key], one.callback_metrics[key], rtol=1e-6, atol=0)

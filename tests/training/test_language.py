"""Next-token training: the loss against torch's on whole logits, one step in two processes, what a checkpoint holds."""

from dataclasses import asdict

import lightning.pytorch as pl
import pytest
import torch
import training_fits
from torch.nn import functional as F
from torch.utils.data import DataLoader
from training_fits import LANGUAGE, Gradients, Rows, same

from diffvision.models import language
from diffvision.models.architecture import architecture
from diffvision.training.cross_entropy import IGNORED, SoftTargets, linear_cross_entropy
from diffvision.training.language import LanguageModule
from diffvision.training.optim import OptimizerSettings

SETTINGS = OptimizerSettings(lr=1e-3, warmup_steps=0, decay="linear", clip_norm=0.1)


class Tokens(Rows):
    """Random packed sequences, of which 11 are validated: of two ranks the second has 3."""

    validated, split, eval_batch_size = 11, 8, 2

    def __init__(self, *, documents: bool = False, learned: bool = False, batch_size: int = 4, length: int = 12):
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, LANGUAGE["vocab_size"], (4 * batch_size, length + 1), generator=generator)
        super().__init__([{"tokens": row} for row in tokens])
        self.batch_size, self.length = batch_size, length
        for number, row in enumerate(self.rows):
            if documents:
                row["documents"] = torch.arange(length + 1) // (2 + number)  # the ranks' counts of predictions differ
            if learned:
                row["learned"] = torch.arange(length + 1) % (1 + number % 8) == 0


def train(module, *callbacks, data=None, **settings):
    return training_fits.train(module, *callbacks, data=data or Tokens(), **settings)


def make(name="diff-debug", model_args=None, **settings):
    torch.manual_seed(0)
    return LanguageModule(name, model_args=LANGUAGE | (model_args or {}), **{"optimizer": SETTINGS} | settings)


def gradients(*, data=None, precision="64-true", **settings):
    kept = Gradients()
    train(make(**settings), kept, data=data, precision=precision)
    return kept.seen


# --- the loss ---


@pytest.mark.parametrize(("chunk", "z_loss", "taught"), [(1, 0.0, 0.0), (7, 1e-2, 0.0), (7, 1e-2, 0.3), (64, 0.0, 0.3)])
def test_chunks_give_the_loss_and_the_gradients_of_whole_logits(chunk, z_loss, taught):
    """With a penalty, and with a teacher's distributions over three tokens."""
    hidden, weight = (torch.randn(n, 16, dtype=torch.float64, requires_grad=True) for n in (23, 40))
    targets = torch.randint(0, 40, (23,))
    targets[::5] = IGNORED
    ids = torch.stack([torch.randperm(40)[:3] for _ in targets])
    probabilities = torch.rand(23, 3, dtype=torch.float64).softmax(dim=1)
    logits, learned = hidden @ weight.T, targets != IGNORED
    teachers = torch.zeros_like(logits).scatter(1, ids, probabilities)
    nll = F.cross_entropy(logits, targets, reduction="sum")
    whole = (1 - taught) * nll + taught * F.cross_entropy(logits[learned], teachers[learned], reduction="sum")
    whole = whole + z_loss * logits.logsumexp(1)[learned].square().sum()
    expected = torch.autograd.grad(3 * whole, [hidden, weight])
    soft = SoftTargets(ids, probabilities, taught) if taught else None
    loss, plain = linear_cross_entropy(hidden, weight, targets, z_loss=z_loss, chunk=chunk, soft=soft)
    torch.testing.assert_close((loss, plain), (whole, nll), rtol=1e-12, atol=0)
    assert not plain.requires_grad
    actual = torch.autograd.grad(3 * loss, [hidden, weight])
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
def test_losses_and_gradients_in_narrower_dtypes(dtype, rtol):
    hidden = torch.randn(200, 32, dtype=dtype, requires_grad=True)
    weight = (torch.randn(300, 32) / 6).to(dtype).requires_grad_()
    targets = torch.randint(0, 300, (200,))
    loss, _ = linear_cross_entropy(hidden, weight, targets, chunk=64)
    assert loss.dtype == torch.float32
    whole = F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=0)
    ours, theirs = (torch.autograd.grad(x / 200, [hidden, weight]) for x in (loss, whole))
    for actual, wanted in zip(ours, theirs, strict=True):
        assert actual.dtype == dtype
        assert (actual - wanted).norm() <= rtol * wanted.norm()


def test_autocast_takes_products_in_its_dtype_and_gives_float32_gradients():
    hidden = torch.randn(50, 32, requires_grad=True)
    weight = (torch.randn(60, 32) / 6).requires_grad_()
    targets = torch.randint(0, 60, (50,))
    exact = F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = linear_cross_entropy(hidden, weight, targets)
    assert loss.item() != exact.item()
    for actual, wanted in zip(
        torch.autograd.grad(loss, [hidden, weight]), torch.autograd.grad(exact, [hidden, weight]), strict=True
    ):
        assert actual.dtype == torch.float32
        assert (actual - wanted).norm() <= 0.02 * wanted.norm()


def test_a_second_backward_pass_is_refused_and_none_costs_no_gradients():
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    loss, _ = linear_cross_entropy(hidden, weight, torch.randint(0, 9, (4,)))
    (2 * loss).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, torch.randint(0, 9, (4,)))[0].grad_fn is None


def test_a_frozen_projection_gets_no_gradient_and_leaves_the_others():
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(9, 8)
    targets = torch.randint(0, 9, (6,))
    linear_cross_entropy(hidden, weight, targets, chunk=4)[0].backward()
    (expected,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, targets, reduction="sum"), [hidden])
    torch.testing.assert_close(hidden.grad, expected)
    assert weight.grad is None


# --- a step ---


@pytest.mark.parametrize("name", ["transformer-debug", "diff-debug", "diffv2-debug"])
def test_a_steps_gradients_are_autograds(name, monkeypatch):
    monkeypatch.setattr(LanguageModule, "loss_chunk", 5)
    args, data = {"num_heads": 2, "tied": name != "diffv2-debug"}, Tokens()
    actual = gradients(name=name, model_args=args, data=data)
    model = make(name, args).model.double()
    tokens = next(iter(DataLoader(data.rows, batch_size=4)))["tokens"]
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    same({n: p.grad for n, p in model.named_parameters()}, actual)


def test_settings_reach_the_optimizer_and_the_norm_before_clipping_is_logged():
    module, free = make(z_loss=1e-3), gradients(z_loss=1e-3, precision="32-true")
    trainer = train(module, max_steps=3)
    trained = trainer.logged_metrics
    assert trained.keys() >= {"train/loss", "train/z_loss", "train/grad_norm", "train/lr"}
    assert trained["train/lr"] == pytest.approx(1e-3 / 3)  # the third of three steps of a line to 0
    first = train(make(z_loss=1e-3))
    norm = torch.stack([g.norm() for g in free.values()]).norm()
    torch.testing.assert_close(first.logged_metrics["train/grad_norm"], norm)
    assert norm > SETTINGS.clip_norm
    assert first.logged_metrics["train/z_loss"] > 0


def test_documents_ends_are_found_before_a_batch_goes_to_a_device_and_change_nothing(monkeypatch):
    module, batch = make(), next(iter(DataLoader(Tokens(documents=True).rows[1:], batch_size=1)))
    expected, _, count = module.sum_losses(module.prepare_batch(batch))
    assert "ends" not in batch
    with monkeypatch.context() as moved:
        moved.setattr(LanguageModule, "device", torch.device("meta"))
        prepared = module.prepare_batch(batch)
    assert prepared["ends"].tolist() == [0, 3, 6, 9, 12]
    loss, _, predictions = module.sum_losses(prepared)
    torch.testing.assert_close((loss, predictions), (expected, count))


def masked_gradients(data):
    """Of the mean over all learned tokens of its first eight rows, by torch's loss of each row apart."""
    model = make().model.double()
    nats, count = 0.0, 0
    for row in data.rows[:8]:
        tokens, numbers, learned = row["tokens"], row["documents"], row["learned"]
        kept = learned[1:] & (numbers[1:] == numbers[:-1])
        logits = model(tokens[None, :-1], documents=numbers[None, :-1])[0]
        nats += F.cross_entropy(logits[kept], tokens[1:][kept], reduction="sum")
        count += int(kept.sum())
    (nats / count).backward()
    return {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("accumulated", [1, 8])
def test_learned_tokens_of_a_step_weigh_alike_in_whichever_batch_they_are(accumulated):
    """One batch of 8 and 8 accumulated batches of 1, with unequal masks."""
    data, kept = Tokens(documents=True, learned=True, batch_size=8), Gradients()
    data.batch_size //= accumulated
    module = make(optimizer={"clip_norm": None})
    train(module, kept, data=data, precision="64-true", accumulate_grad_batches=accumulated)
    same(masked_gradients(data), kept.seen)


def test_validation_weighs_tokens_and_leaves_the_penalty_out():
    module, data = make(z_loss=0.1), Tokens(documents=True)
    trainer = train(module, data=data, limit_val_batches=1.0, val_check_interval=1)
    model = module.model.eval()
    rows = next(iter(DataLoader(data.rows[:11], batch_size=11)))
    tokens, numbers = rows["tokens"], rows["documents"]
    kept = numbers[:, 1:] == numbers[:, :-1]
    with torch.no_grad():
        logits = model(tokens[:, :-1], documents=numbers[:, :-1])[kept]
    loss = F.cross_entropy(logits, tokens[:, 1:][kept])
    measured = trainer.callback_metrics
    assert measured["val/tokens"] == kept.sum()
    torch.testing.assert_close(measured["val/loss"], loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(measured["val/perplexity"], loss.exp(), rtol=1e-5, atol=0)


# --- checkpoints and bad input ---


def test_a_checkpoint_is_plain_and_loads_as_a_model(tmp_path):
    module = make(tokenizer="somewhere/tokenizer.json")
    train(module).save_checkpoint(tmp_path / "x.ckpt")
    stored = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert stored["hyper_parameters"]["config"] == asdict(module.model.config)
    built = architecture(module.model)
    expected = {"model": "diff-debug", "tokenizer": "somewhere/tokenizer.json", "architecture": built}
    assert stored["diffvision"] == expected
    assert set(stored["state_dict"]) == {f"model.{k}" for k in module.model.state_dict()}
    loaded = language.load(tmp_path / "x.ckpt")
    assert loaded.config == module.model.config
    assert all(torch.equal(v, loaded.state_dict()[k]) for k, v in module.model.state_dict().items())

    longer = make(model_args={"max_length": 128, "rotary_theta": 640_000.0}, pretrained=str(tmp_path / "x.ckpt"))
    assert all(torch.equal(v, longer.model.state_dict()[k]) for k, v in module.model.state_dict().items())
    with pytest.raises(ValueError, match="of another model than 'diff-debug'"):
        make(model_args={"lambda_init": 0.8}, pretrained=str(tmp_path / "x.ckpt"))
    with pytest.raises(ValueError, match="the checkpoint is of another"):
        make(model_args={"mlp_dim": 64}).on_load_checkpoint(stored)
    module.on_load_checkpoint(stored)
    with pytest.raises(ValueError, match="LanguageModule"):
        module.on_load_checkpoint({"state_dict": {}})


def test_a_checkpoint_of_another_variant_is_named_with_what_differs(tmp_path):
    module = make("diffv2-debug", {"num_kv_heads": 1})
    train(module).save_checkpoint(tmp_path / "x.ckpt")
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", devices=1, max_steps=2)
    with pytest.raises(ValueError, match=r"num_kv_heads 1 \(here None\), variant 'v2' \(here 'v1'\)"):
        trainer.fit(make(), datamodule=Tokens(), ckpt_path=str(tmp_path / "x.ckpt"))


def test_bad_settings_are_named():
    for settings, message in (
        ({"z_loss": -1.0}, "z_loss"),
        ({"model_args": {"width": 3}}, "model_args: a language model has no width"),
        ({"name": "diff-9q"}, "no model 'diff-9q': the nearest names are"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**settings)
    with pytest.raises(ValueError, match=r"data.length must be at most"):
        train(make(), data=Tokens(length=65))


# --- two processes ---


@pytest.mark.forks
@pytest.mark.parametrize("documents", [False, True])
def test_ddp_has_the_gradients_and_the_validation_of_one_process(documents, tmp_path):
    """With documents also of unequal masks, over two accumulated batches."""
    data = Tokens(documents=documents, learned=documents)
    validated = {"limit_val_batches": 1.0, "val_check_interval": 1, "log_every_n_steps": 1}
    validated |= {"accumulate_grad_batches": 1 + documents}
    kept = Gradients()
    one = train(make(), kept, data=data, precision="64-true", **validated)
    # Forked, so that the two need not import everything again; nothing else runs threads here.
    two = {"devices": 2, "strategy": "ddp_fork", "precision": "64-true"}
    both = train(make(), Gradients(tmp_path), data=data, **two, **validated)
    for rank in (0, 1):
        same(kept.seen, torch.load(tmp_path / f"{rank}.pt", weights_only=True))
    assert both.callback_metrics["val/tokens"] == one.callback_metrics["val/tokens"]
    for key in ("val/loss", "train/loss"):
        torch.testing.assert_close(both.callback_metrics[key], one.callback_metrics[key], rtol=1e-6, atol=0)


def test_tensor_parallelism_is_refused():
    module = make()
    mesh = {"tensor_parallel": type("Mesh", (), {"size": lambda self: 8})()}
    module._device_mesh = type("Meshes", (dict,), {"size": lambda self: 8})(mesh)
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        module.configure_model()

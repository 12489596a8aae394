"""The contrastive step: its gradients against autograd's over the whole batch, in one process and in two."""

import copy
import math
import warnings
from contextlib import nullcontext

import lightning.pytorch as pl
import open_clip
import pytest
import torch
import training_fits
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn import functional as F
from training_fits import Gradients, Rows, same

from diffvision.data.images.folders import EvaluationFolder
from diffvision.export.formats import Options
from diffvision.export.graphs import graphs
from diffvision.export.model_folders import write_open_clip
from diffvision.opening import open_model
from diffvision.training.clip import ContrastiveModule, detach_zero_rows
from diffvision.training.optim import OptimizerSettings

SETTINGS = OptimizerSettings(lr=1e-3, warmup_steps=0)
LENGTH = open_clip.get_model_config("DiffCLIP-debug")["text_cfg"]["context_length"]


class Pairs(Rows):
    """Random images and captions' tokens."""

    def __init__(self, batches: int = 2, length: int = LENGTH):
        generator = torch.Generator().manual_seed(0)
        self.image = torch.randn(8 * batches, 3, 32, 32, generator=generator)
        self.text = torch.randint(1, 98, (8 * batches, LENGTH), generator=generator)
        self.text[:, 20] = 99  # OpenCLIP pools at the largest token, the end
        text = F.pad(self.text, (0, length - LENGTH))
        super().__init__([{"image": i, "text": t} for i, t in zip(self.image, text, strict=True)])


def train(module, *callbacks, data=None, **settings):
    return training_fits.train(module, *callbacks, data=data or Pairs(), **settings)


def make(name="DiffCLIP-debug", **settings):
    """The module with a vocabulary of 100 tokens: AdamW on 49,408 unused rows would be most of the time."""
    torch.manual_seed(0)
    module = ContrastiveModule(name, **{"optimizer": SETTINGS} | settings)
    module.model.token_embedding = nn.Embedding(100, 64)
    return module


def gradients(precision="64-true", **settings):
    kept = Gradients()
    train(make(**settings), kept, precision=precision)
    return kept.seen


@pytest.mark.quick("3-clip", "2-siglip")
@pytest.mark.parametrize("loss", ["clip", "siglip"])
@pytest.mark.parametrize("chunks", [2, 3])
def test_chunked_gradients_are_those_of_the_whole_batch(loss, chunks):
    whole = gradients(loss=loss)
    assert all(g.abs().sum() > 0 for g in whole.values() if g.ndim > 1)
    same(whole, gradients(loss=loss, accum_freq=chunks))


class RandomState(pl.Callback):
    """Keeps the generator's state before and after the first step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.before = torch.get_rng_state()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.after = torch.get_rng_state()


def test_chunks_repeat_their_dropout():
    """With dropout, the gradients are those of one graph over chunks drawn with the same random numbers."""
    module = make(accum_freq=2)
    dropouts = [layer for layer in module.model.visual.modules() if isinstance(layer, nn.Dropout)]
    assert dropouts
    for layer in dropouts:
        layer.p = 0.3
    twin = copy.deepcopy(module).train().double()
    kept, random, data = Gradients(), RandomState(), Pairs()
    train(module, kept, random, data=data, precision="64-true")

    torch.set_rng_state(random.before)
    image, text = data.image[:8].double(), data.text[:8]
    outs = [twin.model(i, t) for i, t in zip(image.chunk(2), text.chunk(2), strict=True)]
    image, text = (torch.cat([o[k] for o in outs]) for k in ("image_features", "text_features"))
    logits, labels = outs[0]["logit_scale"] * image @ text.T, torch.arange(8)
    ((F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2).backward()
    same({n: p.grad for n, p in twin.model.named_parameters()}, kept.seen)
    assert torch.equal(torch.get_rng_state(), random.after)  # the run's generator went on as if there were one pass


@pytest.mark.parametrize("accum_freq", [1, 2])
def test_clipping_logs_the_norm_before_it(accum_freq):
    module = make(accum_freq=accum_freq, optimizer=OptimizerSettings(warmup_steps=0, clip_norm=1e-3))
    free, kept = gradients("32-true"), Gradients()
    trainer = train(module, kept)
    norm = torch.stack([g.norm() for g in free.values()]).norm()
    torch.testing.assert_close(trainer.logged_metrics["train/grad_norm"], norm)
    clipped = torch.stack([p.grad.norm() for p in module.model.parameters() if p.grad is not None])
    assert clipped.norm() <= 1.001e-3


@pytest.mark.parametrize("accum_freq", [1, 2])
def test_gradient_scaler_and_bfloat16(accum_freq):
    exact = gradients("32-true")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    half = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    for plugin in ({"plugins": [half]}, {"precision": "bf16-mixed"}):
        kept = Gradients()
        module = make(accum_freq=accum_freq)
        train(module, kept, **plugin)
        for name, seen in kept.seen.items():
            assert torch.isfinite(seen).all()
            if exact[name].norm() > 1e-2:  # unscaled, and in the right direction
                assert torch.cosine_similarity(seen.flatten(), exact[name].flatten(), 0) > 0.98, name
                torch.testing.assert_close(seen.norm(), exact[name].norm(), rtol=0.15, atol=0)


def test_a_checkpoint_opens_at_its_context_length(tmp_path):
    module = ContrastiveModule("DiffCLIP-debug", context_length=40, optimizer=SETTINGS)
    train(module, data=Pairs(batches=1, length=40)).save_checkpoint(tmp_path / "x.ckpt")
    stored = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert stored["diffvision"]["architecture"]["layers"][""]["context_length"] == 40
    opened = open_model(str(tmp_path / "x.ckpt"))
    assert opened.tokenizer(["a dog " * 99]).shape == (1, 40)
    write_open_clip(opened, tmp_path / "folder", Options())
    again = open_model(str(tmp_path / "folder"))
    assert torch.equal(again.module.positional_embedding, module.model.positional_embedding)
    assert graphs(again.module)["text"].inputs["tokens"].shape[1] == 40
    with pytest.raises(ValueError, match="context_length 40 there and 24 here"):
        make().check_checkpoint(stored)
    shorter = ContrastiveModule(f"local-dir:{tmp_path / 'folder'}", context_length=9, context_positions="first")
    assert torch.equal(shorter.model.positional_embedding, module.model.positional_embedding[:9])


def test_compile_checkpointing_and_locks_leave_the_keys():
    plain = make()
    module = make(compile=True, grad_checkpointing=True, lock_text=0)
    assert module.state_dict().keys() == plain.state_dict().keys()
    assert not any(p.requires_grad for p in module.model.transformer.parameters())
    assert all(p.requires_grad for p in module.model.visual.parameters())


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="accum_freq"):
        make(accum_freq=0)
    with pytest.raises(ValueError, match=r"mean, std.* got men"):
        make(preprocess={"men": [0.5] * 3})


@pytest.mark.quick("clip-2")
@pytest.mark.forks
@pytest.mark.parametrize(("loss", "accum_freq"), [("clip", 1), ("clip", 2), ("siglip", 2)])
def test_two_processes_have_the_gradients_of_one(loss, accum_freq, tmp_path):
    kept = Gradients()
    train(make(loss=loss), kept, precision="64-true")
    # Forked, so that the two need not import everything again; nothing else runs threads here.
    two = {"devices": 2, "strategy": "ddp_fork", "use_distributed_sampler": False, "precision": "64-true"}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "`?torch.distributed", FutureWarning)
        train(make(loss=loss, accum_freq=accum_freq), Gradients(tmp_path), **two)
    for rank in (0, 1):
        same(kept.seen, torch.load(tmp_path / f"{rank}.pt", weights_only=True))


@pytest.mark.parametrize(("precision", "expected"), [("bf16-mixed", "bf16"), ("32-true", "fp32")])
def test_evaluations_have_the_precision_of_the_run(precision, expected, monkeypatch):
    seen = []
    monkeypatch.setattr("diffvision.training.clip.evaluate", lambda *_, **settings: seen.append(settings) or {})
    folder = object.__new__(EvaluationFolder)
    trainer = pl.Trainer(precision=precision, accelerator="cpu", logger=False, enable_checkpointing=False)
    module = make()
    module.trainer = trainer
    module.validation_step(folder, 0)
    assert seen[0]["precision"] == expected


# --- extreme values ---


def learn(module, data, **settings):
    trainer = train(module, data=data, max_steps=-1, max_epochs=1, **settings)
    tensors = [*module.model.parameters(), *(t for s in trainer.optimizers[0].state.values() for t in s.values())]
    assert all(tensor.isfinite().all() for tensor in tensors)
    return trainer


def test_chunks_of_a_batch_are_skipped_together():
    module, data = make(accum_freq=2), Pairs()
    before = copy.deepcopy(module.state_dict())
    data.image[0, 0, 0] = math.nan
    with pytest.warns(UserWarning, match="at step 0"):
        learn(module, data, limit_train_batches=1)
    same(before, module.state_dict(), rtol=0, atol=0)
    with pytest.warns(UserWarning, match="at step 0"):
        trainer = learn(module, data)
    assert not torch.equal(before["model.visual.trunk.norm.weight"], module.model.visual.trunk.norm.weight)
    assert trainer.logged_metrics["train/skipped_steps"] == 1


@pytest.mark.parametrize(("start", "end"), [(100.0, 100), (-100.0, 1)])
def test_the_logit_scale_stays_between_1_and_100(start, end):
    module = make()
    nn.init.constant_(module.model.logit_scale, start)
    with pytest.warns(UserWarning, match="at step 0") if start > 0 else nullcontext():  # exp(100) is infinite
        learn(module, Pairs(batches=1))
    assert module.model.logit_scale.exp().item() == pytest.approx(end)


@pytest.mark.parametrize(("loss", "accum_freq"), [("clip", 1), ("siglip", 2)])
def test_zero_identical_and_single_embeddings(loss, accum_freq):
    """All text embeddings zero, all images alike; and, in one pass, a batch of one pair."""
    module, data = make(loss=loss, accum_freq=accum_freq), Pairs()
    nn.init.zeros_(module.model.text_projection)
    data.image[:] = data.image[0].clone()
    assert learn(module, data, limit_train_batches=1).logged_metrics["train/grad_norm"] < 1e3
    learn(module, data)
    if accum_freq == 1:
        data.batch_size = 1
        learn(make(loss=loss), data, limit_train_batches=2)


def test_a_zero_embedding_has_no_gradient_and_others_keep_theirs():
    x = torch.randn(3, 8, requires_grad=True)
    with torch.no_grad():
        x[1] = 0
    target = torch.randn(3, 8)
    (plain,) = torch.autograd.grad((F.normalize(x, dim=-1) * target).sum(), x)
    (safe,) = torch.autograd.grad((detach_zero_rows(F.normalize(x, dim=-1)) * target).sum(), x)
    assert plain[1].abs().max() > 1e11
    assert not safe[1].any()
    assert torch.equal(plain[[0, 2]], safe[[0, 2]])

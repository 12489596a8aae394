"""Which file a run stands for, and which runs are seeds of one model."""

import os

import pytest
import torch
import yaml

from diffvision.comparison.entries import group_seeds, read_entries


def run(folder, *, model="DiffCLIP-debug", seed=0, lr=1e-3, best=None, average=0.9):
    """A run's directory: a last checkpoint that names the best one, and a configuration."""
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    state = {"monitor": "zero_shot/digits/acc1", "best_model_path": f"/elsewhere/{best}"}
    state["best_model_score"] = torch.tensor(0.5)
    content = {"global_step": 1234, "callbacks": {"ModelCheckpoint{'monitor': ...}": state} if best else {}}
    if best:
        torch.save({}, checkpoints / best)
    torch.save(content, checkpoints / "last.ckpt")
    callbacks = [{"init_args": {"dirpath": str(folder)}}, {"init_args": {"decay": average}}]
    config = {
        "seed_everything": seed,
        "trainer": {"max_epochs": 2, "logger": {"save_dir": str(folder)}, "callbacks": callbacks},
        "model": {"init_args": {"model": model, "optimizer": {"lr": lr}}},
        "data": {"init_args": {"seed": seed, "train": "x"}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return str(folder)


def labels(*models):
    return {group.label: len(group.entries) for group in group_seeds(read_entries(models))}


def test_a_run_is_its_best_checkpoint_or_the_last(tmp_path):
    best, last = read_entries([run(tmp_path / "a", best="best.ckpt"), run(tmp_path / "b")])
    assert best.model == str(tmp_path / "a" / "checkpoints" / "best.ckpt")
    assert best.which == "best zero_shot/digits/acc1 0.5000"
    assert last.model == str(tmp_path / "b" / "checkpoints" / "last.ckpt")
    assert last.which == "last, step 1,234"


def test_a_folder_with_one_run_stands_for_it(tmp_path):
    run(tmp_path / "out" / "clip" / "version_0")
    entry, _ = read_entries([str(tmp_path / "out"), "CLIP-debug"])
    assert entry.run == tmp_path / "out" / "clip" / "version_0"
    run(tmp_path / "out" / "clip" / "version_1")
    with pytest.raises(ValueError, match="2 runs"):
        read_entries([str(tmp_path / "out"), "CLIP-debug"])


def test_runs_that_differ_in_their_seeds_are_one_model(tmp_path):
    seeds = [run(tmp_path / f"diff-{seed}", seed=seed) for seed in range(3)]
    plain = [run(tmp_path / f"clip-{seed}", seed=seed, model="CLIP-debug") for seed in range(2)]
    assert labels(plain[0], *seeds, plain[1]) == {"CLIP-debug": 2, "DiffCLIP-debug": 3}
    assert labels(*(f"V1={one}" for one in seeds), plain[0]) == {"V1": 3, "CLIP-debug": 1}
    assert labels(f"A={seeds[0]}", f"B={seeds[1]}") == {"A": 1, "B": 1}  # as asked for
    faster = run(tmp_path / "faster", seed=7, lr=3e-3)
    averaged = run(tmp_path / "averaged", seed=8, average=0.99)
    assert labels(averaged, *seeds) == {"DiffCLIP-debug averaged": 1, "DiffCLIP-debug diff-0": 3}
    assert labels(*seeds, faster) == {"DiffCLIP-debug diff-0": 3, "DiffCLIP-debug faster": 1}


def test_what_is_refused_before_anything_is_opened(tmp_path):
    a, b = run(tmp_path / "a"), run(tmp_path / "b", lr=0.1, seed=1)
    for models, message in (
        ([a], "^1 model to compare: give two or more"),
        ([], "^no models to compare"),
        ([a, b, a], "a is given twice"),
        ([a, os.path.relpath(f"{a}/checkpoints/last.ckpt")], "last.ckpt is given twice"),
        ([f"X={a}", f"X={b}"], "two models have the label .X., and are not seeds of one run"),
        (["X=CLIP-debug", f"X={a}"], "label .X., and are not seeds"),
    ):
        with pytest.raises(ValueError, match=message):
            group_seeds(read_entries(models))
    (tmp_path / "b" / "checkpoints" / "last.ckpt").unlink()
    with pytest.raises(ValueError, match="checkpoints/"):
        read_entries([a, b])

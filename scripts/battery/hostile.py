"""Group H: files from strangers. Each payload would make a file, `trace`: after each case it must be absent."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from battery.case import Seen, case, stock
from battery.payloads import (
    HOSTILE_TYPES,
    Payload,
    coded_openclip_folder,
    hostile_shards,
    hostile_weights,
    hugging_face_folder,
    stranger,
)
from battery.small import fit, goes, raised, refused, shards, short
from diffvision.data import ShardSet
from diffvision.data.shards.cache import ShardCache
from diffvision.data.shards.index import shard_index
from diffvision.data.shards.sources import Shard
from diffvision.data.shards.verify import sha256_of
from diffvision.data.shards.writer import write_manifest, write_tar
from diffvision.models import language
from diffvision.opening import open_model
from diffvision.training.classification import ClassificationModule
from diffvision.training.clip import ContrastiveModule

TRACE = Path("trace")
CONTRASTIVE = ("--model=ContrastiveModule", "--model.model=CLIP-debug", "--data=ImageTextData")
TEXT = ("--tasks=perplexity", "--data=t.txt", "--device=cpu")


def command(*more: str, data: str = "shards") -> list[str]:
    """A contrastive run of one step; `fit` is of classification."""
    flags = [flag for flag in fit(steps=1, data=data) if "num_classes" not in flag]
    return [*flags, *CONTRASTIVE, *more]


def traceless(run: Callable[[], Seen | str]) -> Seen | str:
    """What a case saw, once it is sure that the payload did not run."""
    Path("t.txt").write_text("a b c")
    os.environ["XDG_CACHE_HOME"] = str(Path("cache").absolute())
    seen = run()
    assert not TRACE.exists(), "THE PAYLOAD RAN"
    return seen


def or_error(run: Callable[[], str]) -> str:
    try:
        return run()
    except AssertionError:
        raise
    except Exception as error:
        return short(f"{type(error).__name__}: {error}")


def payload(name: str, expected: str, *, quick: bool = False) -> Callable[[Callable], Callable]:
    """`case`, of a payload."""

    def added(run: Callable) -> Callable:
        case(f"H {name}", expected, kind="payload", quick=quick)(partial(traceless, run))
        return run

    return added


def twin(name: str) -> Callable[[Callable], Callable]:
    """`stock`, of a payload: an error is a refusal, if the trace is absent."""

    def added(run: Callable) -> Callable:
        stock(f"H {name}")(partial(traceless, partial(or_error, run)))
        return run

    return added


# --- pickles in shards ---


def pickles_in_shards(suffix: str) -> str:
    directory = hostile_shards(Path("shards"), TRACE.absolute(), suffix)
    write_manifest(directory)
    goes(*command("--data.max_bad_fraction=1", "--data.batch_size=2"))
    return "trained on the image and the caption beside it; never opened"


def pickles_in_webdataset(suffix: str) -> str:
    import webdataset

    hostile_shards(Path("shards"), TRACE.absolute(), suffix)
    dataset = webdataset.WebDataset("shards/0.tar", shardshuffle=False, handler=webdataset.ignore_and_continue)
    count = sum(1 for _ in dataset.decode("pil", handler=webdataset.ignore_and_continue))
    return f"{count} samples"


for suffix in HOSTILE_TYPES:
    if suffix != "jpg":  # that one is an image, and damaged: group D
        name = f"pickle as member .{suffix}"
        payload(name, "never read", quick=suffix == "pyd")(partial(pickles_in_shards, suffix))
        twin(name)(partial(pickles_in_webdataset, suffix))


@payload("pickle in a shard's index", "the index is made anew")
def index() -> str:
    write_tar(Path("0.tar"), [{"__key__": "0", "txt": "a"}])
    shard_index(Path("0.tar"))
    sidecar = Path(".index", "0.tar.npz")
    with np.load(sidecar) as kept:
        content = dict(kept)
    np.savez(sidecar, **{**content, "types": np.array([Payload(TRACE.absolute())], dtype=object)})
    assert len(shard_index(Path("0.tar"))) == 1
    return "made anew from the shard's headers"


@payload("a link in the place of a shard's index", "nothing is written through it", quick=True)
def linked_index() -> str:
    write_tar(Path("0.tar"), [{"__key__": "0", "txt": "a"}])
    Path("elsewhere").mkdir()
    Path(".index").symlink_to("elsewhere")
    for name in ("manifest.json.part", "sizes.json.part"):
        Path(name).symlink_to("elsewhere/escaped")
    assert len(shard_index(Path("0.tar"))) == 1
    sha256_of(Path("0.tar"))
    write_manifest(".")
    assert not list(Path("elsewhere").iterdir())
    return "the user's cache has the index; links in the place of other files are removed"


# --- commands as shards ---

LOCATIONS = {
    "pipe:": "pipe:touch {0}",
    "one part of a chain": "a.tar::pipe:touch {0}",
    "file:": "file:{0}",
    "an option": "-c touch {0}",
    "a scheme of many": "gs+pipe://touch {0}",
}


def command_as_shard(location: str) -> str:
    shards()
    location = location.format(TRACE.absolute())
    return short(refused(*command(f"--data.train=[shards, '{location}']"), words="shard location"))


def command_in_webdataset(location: str) -> str:
    import webdataset

    write_tar(Path("a.tar"), [{"__key__": "0", "txt": "a"}])
    location = location.format(TRACE.absolute())
    return f"{sum(1 for _ in webdataset.WebDataset(location, shardshuffle=False, empty_check=False))} samples"


for what, location in LOCATIONS.items():
    payload(f"shard named by {what}", "refused, with what to give", quick=what == "pipe:")(
        partial(command_as_shard, location)
    )
for what in ("pipe:", "one part of a chain"):
    twin(f"shard named by {what}")(partial(command_in_webdataset, LOCATIONS[what]))


@payload("GOPEN_REWRITE turns s3:// into a command", "not looked at")
def rewritten() -> str:
    os.environ["GOPEN_REWRITE"] = f"s3://=pipe:touch {TRACE.absolute()} "
    return short(raised(lambda: ShardSet("s3://bucket/0.tar", ShardCache(Path("cache")))))


@twin("GOPEN_REWRITE turns s3:// into a command")
def rewritten_in_webdataset() -> str:
    os.environ["GOPEN_REWRITE"] = f"s3://=pipe:touch {TRACE.absolute()} "
    return command_in_webdataset("s3://bucket/0.tar")


@payload("${WDS_X} in a location", "text as it is")
def variable() -> str:
    os.environ["WDS_X"] = f"pipe:touch {TRACE.absolute()}"
    return short(refused(*command("--data.train=${WDS_X}.tar"), words="${WDS_X}.tar"))


# --- names ---

KEYS = {"climbing": "../../escaped", "absolute": "/tmp/diffvision-escaped", "with an escape": "\x1b]0;x\x07/escaped"}


def escaping(key: str) -> str:
    directory = Path("deep/down/shards")
    directory.mkdir(parents=True)
    write_tar(directory / "0.tar", [{"__key__": key, "txt": "a b c"}])
    Path("tokenizer.txt").write_text("a b c " * 50)
    before = {path for path in Path().rglob("*") if directory not in path.parents}
    for words in (["check"], ["stats"]):
        from battery.small import run

        run("data", *words, str(directory), "--num_workers=0")
    after = {path for path in Path().rglob("*") if directory not in path.parents} - before
    assert not [path for path in after if path.parts[0] != "cache"], after
    assert not Path("/tmp/diffvision-escaped.txt").exists()
    return "a name in reports alone; nothing written"


for what, key in KEYS.items():
    payload(f"key {what}", "writes nothing elsewhere")(partial(escaping, key))


def listing(name: str) -> str:
    Path("shards").mkdir()
    told = {"format": "diffvision-shards-1", "shards": [{"name": name, "samples": 1, "bytes": 1, "sha256": "x"}]}
    Path("shards", "manifest.json").write_text(json.dumps(told))
    return short(raised(lambda: ShardSet("shards"), "names there have no folders"))


for name in ("../0.tar", "/etc/passwd"):
    payload(f"manifest that lists {name}", "refused")(partial(listing, name))

# --- bombs ---

PACKERS = {"gz": gzip.compress, "xz": lzma.compress}


def bomb(kind: str) -> str:
    import diffvision.data.shards.cache

    diffvision.data.shards.cache._ALWAYS_UNPACKED = 1 << 20  # of a bomb of 30 MB, not of 30 GB
    path = Path(f"0.tar.{kind}")
    path.write_bytes(PACKERS[kind](bytes(30_000_000)))
    cache = ShardCache(Path("unpacked"))
    message = raised(lambda: cache.fetch(Shard(str(path))), "unpacks to more than")
    assert sum(found.stat().st_size for found in cache.directory.rglob("*") if found.is_file()) == 0
    return short(message)


for kind in PACKERS:
    payload(f".{kind} bomb as a shard", "stopped while it is unpacked, nothing kept")(partial(bomb, kind))


@payload(".gz bomb as a member", "of a type that nothing reads")
def member_bomb() -> str:
    shards(count=1)
    Path("shards", "0.tar").unlink()
    write_tar(Path("shards/0.tar"), [{"__key__": "0", "txt.gz": gzip.compress(bytes(200_000_000)), "txt": "a b"}])
    write_manifest(Path("shards"))
    assert ShardSet("shards").members((0, 0)).types() == ["txt"]
    return "never unpacked"


@twin(".gz bomb as a member")
def member_bomb_in_webdataset() -> str:
    import webdataset

    write_tar(Path("0.tar"), [{"__key__": "0", "txt.gz": gzip.compress(bytes(200_000_000)), "txt": "a b"}])
    size = max(len(v) for s in webdataset.WebDataset("0.tar", shardshuffle=False).decode() for v in s.values())
    assert size < 1e8, f"unpacked to {size:,} bytes"
    return "kept small"


# --- pickles in checkpoints ---

READERS: dict[str, Callable[[str], object]] = {
    "evaluate": lambda path: open_model("CLIP-debug", path),
    "generate": language.load,
    "ContrastiveModule": lambda path: ContrastiveModule("CLIP-debug", pretrained=path),
    "ClassificationModule": lambda path: ClassificationModule(
        "diff_vit_debug", num_classes=2, model_args={"checkpoint_path": path}
    ),
}


def pickled_weights(layout: str, forced: bool) -> str:
    if forced:
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    path = hostile_weights(Path("x.ckpt"), TRACE.absolute(), layout)
    for reader in READERS.values():
        message = raised(partial(reader, str(path)), "x.ckpt")
    shards()
    refused(*command(f"--ckpt_path={path}"), words="x.ckpt")
    return f"refused by {', '.join(READERS)} and fit: {short(message, 80)}"


def pickled_weights_in_torch() -> str:
    hostile_weights(Path("x.ckpt"), TRACE.absolute(), "zip")
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    torch.load("x.ckpt")
    return "loaded"


for layout in ("zip", "legacy", "plain pickle"):
    for forced in (False, True):
        name = f"pickle in a checkpoint ({layout}{', TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD' if forced else ''})"
        payload(name, "refused by all that load weights", quick=layout == "zip")(
            partial(pickled_weights, layout, forced)
        )
        if forced and layout == "zip":
            twin(name)(pickled_weights_in_torch)


@payload("checkpoint that names its own instantiator", "not asked")
def instantiator() -> str:
    module = stranger(Path("stranger"), TRACE.absolute())
    sys.path.insert(0, "stranger")
    hyper = {"_instantiator": f"{module}.Thing", "_class_path": f"{module}.Thing"}
    torch.save({"state_dict": {"w": torch.zeros(1)}, "hyper_parameters": hyper}, "x.ckpt")
    shards()
    refused(*command("--ckpt_path=x.ckpt"), words="x.ckpt")
    return short(raised(lambda: language.load("x.ckpt"), "checkpoint"))


@payload("recipe with weights_only: false", "refused")
def asks_for_pickles() -> str:
    hostile_weights(Path("x.ckpt"), TRACE.absolute(), "zip")
    Path("hostile.yaml").write_text("ckpt_path: x.ckpt\nweights_only: false\n")
    shards()
    return short(refused(*command("--config=hostile.yaml"), words="weights_only is false"))


@payload("sharded checkpoint with a pickle as .metadata", "directories are refused")
def sharded() -> str:
    Path("x.ckpt").mkdir()
    Path("x.ckpt", ".metadata").write_bytes(pickle.dumps(Payload(TRACE.absolute())))
    shards()
    return short(refused(*command("--ckpt_path=x.ckpt"), words="a directory of shards"))


@twin("sharded checkpoint with a pickle as .metadata")
def sharded_in_torch() -> str:
    import torch.distributed.checkpoint

    Path("x.ckpt").mkdir()
    Path("x.ckpt", ".metadata").write_bytes(pickle.dumps(Payload(TRACE.absolute())))
    torch.distributed.checkpoint.FileSystemReader("x.ckpt").read_metadata()
    return "read"


def url_as_checkpoint(flag: str) -> str:
    shards()
    return short(refused(*command(f"{flag}=http://127.0.0.1:9/x.ckpt"), words="checkpoints are not loaded from URLs"))


for flag in ("--ckpt_path", "--model.pretrained"):
    payload(f"URL as {flag}", "refused: download it, compare its sha256", quick=flag == "--ckpt_path")(
        partial(url_as_checkpoint, flag)
    )

# --- what comes with models ---


@payload("OpenCLIP folder with trust_remote_code", "refused")
def coded_openclip() -> str:
    folder = coded_openclip_folder(Path("model").absolute(), TRACE.absolute())
    return short(raised(lambda: open_model(f"local-dir:{folder}"), "trust_remote_code"))


def coded_hugging_face(tokenizer: bool) -> str:
    os.environ["HF_MODULES_CACHE"] = str(Path("modules").absolute())
    hugging_face_folder(Path("model"), TRACE.absolute(), tokenizer)
    return short(refused("evaluate-language", "hf:model", *TEXT, words="trust_remote_code"))


for tokenizer in (False, True):
    payload(f"Hugging Face folder with code for its {'tokenizer' if tokenizer else 'model'}", "refused")(
        partial(coded_hugging_face, tokenizer)
    )

# --- configurations ---

WAYS = {
    "as the model": "--model={0}.Thing",
    "as a callback": "--trainer.callbacks+={0}.Watcher",
    "in a list of callbacks": "--trainer.callbacks=[{{class_path: {0}.Watcher}}]",
    "asked for help": "--model.help={0}.Thing",
    "in a file": "--config=hostile.yaml",
}


def foreign_class(way: str) -> str:
    module = stranger(Path("stranger"), TRACE.absolute())
    sys.path.insert(0, "stranger")
    Path("hostile.yaml").write_text(f"trainer:\n  callbacks:\n    - class_path: {module}.Watcher\n")
    shards()
    message = refused(*command(way.format(module)), words=f"--allow {module}")
    assert module not in sys.modules
    return short(message)


def foreign_class_in_lightning(way: str) -> str:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    module = stranger(Path("stranger"), TRACE.absolute())
    sys.path.insert(0, "stranger")
    Path("hostile.yaml").write_text(f"trainer:\n  callbacks:\n    - class_path: {module}.Watcher\n")
    try:
        LightningCLI(BoringModel, subclass_mode_model=True, args=[way.format(module)], run=False)
    except SystemExit:
        return "refused"
    return "parsed"


for what, way in WAYS.items():
    payload(f"class_path of a stranger {what}", "refused before it is imported; --allow adds it", quick="file" in what)(
        partial(foreign_class, way)
    )
    if what in ("as the model", "in a file"):
        twin(f"class_path of a stranger {what}")(partial(foreign_class_in_lightning, way))


def callable_path(path: str) -> str:
    shards()
    return short(refused(*command(f"--trainer.callbacks={path}"), words="was not imported"))


for path in ("os.system", "lightning.pytorch.callbacks.LambdaCallback", "diffvision.training.fit.sys.exit"):
    payload(f"class_path {path}", "refused")(partial(callable_path, path))

TAGS = {
    "calls": "seed_everything: !!python/object/apply:pathlib.Path.touch [{0}]\n",
    "names a function": "model: !!python/name:os.system\n",
}


def tagged(text: str) -> str:
    from battery.small import run

    Path("hostile.yaml").write_text(text.format(TRACE.absolute()))
    status, told = run("fit", "--config=hostile.yaml")
    assert status
    assert "could not determine a constructor for the tag" in told
    return "refused: could not determine a constructor for the tag"


for what, text in TAGS.items():
    payload(f"YAML tag that {what}", "refused")(partial(tagged, text))


@payload("YAML aliases that stand for a billion values", "refused before they are multiplied")
def laughs() -> str:
    from battery.small import run

    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    Path("hostile.yaml").write_text("\n".join(lines))
    status, told = run("fit", "--config=hostile.yaml")
    assert status
    assert "stands for more than 100,000 values" in told
    return "refused: stands for more than 100,000 values"

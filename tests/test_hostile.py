"""Files from strangers: each payload would leave a trace, and none is there once it has been refused.

One group a kind, through the commands and functions that users call.
"""

import gzip
import importlib
import io
import json
import pickle
import socket
import sys
import tarfile
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from hostile_files import (
    HOSTILE_TYPES,
    Payload,
    coded_openclip_folder,
    hostile_shards,
    hostile_weights,
    hugging_face_folder,
    stranger,
)
from language_fixtures import make_llama
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader

from diffvision import cli
from diffvision.data import ShardSet
from diffvision.data.datasets.digits import png
from diffvision.data.shards.index import shard_index
from diffvision.data.shards.remote import ShardCache
from diffvision.data.shards.sidecars import sidecar
from diffvision.data.shards.writer import write_manifest, write_tar
from diffvision.data.text.tokenizers import load_tokenizer, train_tokenizer
from diffvision.models import language
from diffvision.opening import open_model
from diffvision.training.classification import ClassificationModule
from diffvision.training.clip import ContrastiveModule
from diffvision.training.fit import FitCLI, fit

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning"),  # torch's, of pickles not written by it
]


@pytest.fixture
def trace(tmp_path) -> Path:
    """The file that a payload would make, here or in a process of its own."""
    return tmp_path / "trace"


@pytest.fixture(autouse=True)
def _no_trace(trace, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(trace.parent / "cache"))
    yield
    assert not trace.exists(), "the payload ran"


@pytest.fixture
def module(tmp_path, trace, monkeypatch) -> str:
    """A module that writes the file when it is imported, with a class of every kind that a configuration may want."""
    stranger(tmp_path / "stranger", trace)
    monkeypatch.syspath_prepend(tmp_path / "stranger")
    importlib.invalidate_caches()
    yield "stranger_module"
    sys.modules.pop("stranger_module", None)


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("shards")
    write_tar(
        directory / "0.tar", [{"__key__": f"{i}", "png": png(np.zeros((32, 32, 3))), "txt": "a"} for i in range(4)]
    )
    write_manifest(directory)
    return directory


def run_of(shards: Path, *more: str) -> list[str]:
    """The command line of a run of one step."""
    return [
        *("fit", "--model=ContrastiveModule", "--model.model=CLIP-debug", "--model.optimizer.warmup_steps=0"),
        *("--data=ImageTextData", f"--data.train={shards}", "--data.batch_size=2", "--data.num_workers=0"),
        *("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_steps=1", "--trainer.logger=false"),
        *("--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"),
        *("--trainer.enable_model_summary=false", "--trainer.limit_val_batches=0"),
        *more,
    ]


def refused(command: list[str], capsys, *message: str) -> None:
    """The command ends with status 1 or 2 and one line that says all this."""
    assert cli.main(command) in (1, 2)
    error = capsys.readouterr().err
    assert "diffvision: error: " in error
    assert "Traceback" not in error
    for words in message:
        assert words in error


# ---- configurations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "--model={0}.Thing",
        "--model.class_path={0}.Thing",
        "--model.help={0}.Thing",
        "--data={0}.Data",
        "--trainer.callbacks+={0}.Watcher",
        "--trainer={{strategy: {{class_path: {0}.Strategy}}}}",
        "--trainer.plugins=[{{class_path: {0}.Plugin}}]",
        '--model={{"class_path": "{0}.Thing", "init_args": {{}}}}',
    ],
)
def test_a_class_path_outside_of_the_list_is_not_imported(words, module, shards, capsys):
    words = words.format(module)
    refused(run_of(shards, words), capsys, f"'{module}.", f"--allow {module}")
    assert module not in sys.modules


REFUSED, NO_OBJECT = "--allow stranger_module", "could not determine a constructor"
IN_FILES = {
    # which file holds the class_path: the arguments, that file, and what the error says
    "a configuration": ("--config={0}", "trainer:\n  callbacks:\n    - class_path: {1}.Watcher\n", REFUSED),
    "a sub-configuration": ("--model={0}", "class_path: {1}.Thing\n", REFUSED),
    "of a sub-configuration": ("--config={2}", "class_path: {1}.Thing\n", REFUSED),
    "nested": (
        "--config={0}",
        "model:\n  class_path: ContrastiveModule\n  init_args:\n    model: CLIP-debug\n"
        "    optimizer:\n      class_path: {1}.Thing\n",
        REFUSED,
    ),
    "one that allows itself": ("--config={0}", "allow: {1}\nmodel:\n  class_path: {1}.Thing\n", "allow"),
    "an object": ("--config={0}", "seed_everything: !!python/object/apply:pathlib.Path.touch [{3}]\n", NO_OBJECT),
    "a module": ("--model={0}", "model: !!python/module:stranger_module\n", NO_OBJECT),
}


@pytest.mark.parametrize("file", IN_FILES)
def test_a_class_path_in_a_file_is_not_imported(file, module, shards, tmp_path, trace, capsys):
    flag, text, message = IN_FILES[file]
    hostile, outer = tmp_path / "hostile.yaml", tmp_path / "outer.yaml"
    hostile.write_text(text.format(hostile, module, outer, trace))
    outer.write_text("model: hostile.yaml\n")
    refused(run_of(shards, flag.format(hostile, module, outer)), capsys, message)
    if file == "a configuration":
        words = ["validate", *run_of(shards)[1:5], f"--config={hostile}"]
        refused(words, capsys, "--allow stranger_module")
    assert module not in sys.modules


def test_configurations_of_the_other_commands_import_nothing(module, tmp_path, capsys):
    hostile, options = tmp_path / "hostile.yaml", f"options:\n  class_path: {module}.Thing\n"
    hostile.write_text("checkpoint: x\ntasks: perplexity\n" + options)
    refused(["evaluate-language", f"--config={hostile}"], capsys, f"'{module}.Thing'", "--allow")
    hostile.write_text("model: CLIP-debug\ndata: x\n" + options)
    refused(["evaluate", f"--config={hostile}"], capsys, f"'{module}.Thing'")
    refused(["evaluate", "CLIP-debug", f"--options={module}.Thing", "--data=x"], capsys)
    hostile.write_text("model: CLIP-debug\ndata: x\npreprocess:\n" + options.replace("options", "  mean"))
    refused(["evaluate", f"--config={hostile}"], capsys)
    assert module not in sys.modules


def test_what_is_only_data_is_not_imported(module, shards):
    """A dictionary that looks like a class stays one, and a word that names a class is a word."""
    with pytest.raises((ValueError, TypeError)):
        fit(
            [
                *("fit", "--model=ClassificationModule", "--model.model=diff_vit_debug", "--model.num_classes=2"),
                f"--model.model_args={{x: {{class_path: {module}.Thing}}}}",
                *run_of(shards)[4:],
            ]
        )
    with pytest.raises(Exception, match="profiler"):
        fit(run_of(shards, f"--trainer.profiler={module}.Thing"))
    assert module not in sys.modules


@pytest.mark.parametrize(
    "path", ["os.system", "diffvision.__main__.main", "lightning.pytorch.callbacks.model_checkpoint.os.system"]
)
def test_callables_that_run_things_are_refused(path, shards):
    with pytest.raises(ValueError, match="--allow"):
        fit(run_of(shards, f"--trainer.callbacks={path}"))


def test_allow_adds_a_prefix_for_that_command_alone(module, shards, trace, capsys):
    """And a module that is allowed is imported: the payload works."""

    class Parsed(FitCLI):
        def instantiate_classes(self):
            pass

        def _run_subcommand(self, subcommand):
            pass

    for words in (["--allow", module], [f"--allow={module}."]):
        made = Parsed([*words, *run_of(shards, f"--trainer.callbacks={module}.Watcher")])
        assert made.config.fit.trainer.callbacks.class_path == f"{module}.Watcher"
        assert trace.exists()
        trace.unlink()
        sys.modules.pop(module)
    refused(run_of(shards, f"--trainer.callbacks={module}.Watcher"), capsys, "--allow stranger_module")
    for wrong in ("*", "", "no-name", "jsonargparse"):
        with pytest.raises(ValueError, match="--allow must be"):
            fit([*run_of(shards), f"--allow={wrong}"])


def test_what_is_allowed_anyway_stays_so_after_a_command(shards):
    for words in (["--allow=diffvision.training"], []):
        fit(run_of(shards, "--model=diffvision.training.ContrastiveModule", *words))


def test_values_are_not_looked_up_in_the_environment(shards, monkeypatch, capsys):
    """Neither resolvers nor variables: what is written is what is meant."""
    monkeypatch.setenv("PL_FIT__MODEL", "stranger_module.Thing")
    monkeypatch.setenv("SECRET", "x")
    refused(run_of(shards, "--data.train=${oc.env:SECRET}.tar"), capsys, "${oc.env:SECRET}.tar")


@pytest.fixture
def no_connection(monkeypatch):
    """A connection to the network is refused, and is a failure."""
    tried = []

    def connect(socket, address):
        tried.append(address)
        raise ConnectionRefusedError(address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    yield
    assert tried == []


@pytest.mark.usefixtures("no_connection")
@pytest.mark.parametrize("url", ["http://127.0.0.1:9/c.yaml", "simplecache::http://127.0.0.1:9/c"])
def test_configurations_are_not_fetched(url):
    with pytest.raises((ValueError, FileNotFoundError), match=r"no configuration file|not exist"):
        fit(["fit", "--config", url])


# ---- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_connection")
@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x.ckpt", "data:,gASV"])
def test_checkpoints_are_not_fetched(url, shards, capsys):
    message = "checkpoints are not loaded from URLs: download it, check its sha256"
    refused(run_of(shards, f"--ckpt_path={url}"), capsys, "ckpt_path is", message)
    refused(run_of(shards, f"--model.pretrained={url}"), capsys, "pretrained is", message)
    refused(["generate", url, "--prompt=a"], capsys, message)
    refused(run_of(shards, "--ckpt_path=registry:model:version:v2"), capsys, "ckpt_path is 'registry:")
    for call in (
        lambda: open_model("CLIP-debug", url),
        lambda: language.load(url),
        lambda: language.load(Path(url)),
        lambda: language.find_tokenizer(url),
        lambda: ClassificationModule("diff_vit_debug", num_classes=2, model_args={"checkpoint_path": url}),
        lambda: ClassificationModule(
            "diff_vit_debug", num_classes=2, model_args={"pretrained": True, "pretrained_cfg_overlay": {"url": url}}
        ),
    ):
        with pytest.raises(ValueError, match="checkpoints are not loaded from"):
            call()


def test_the_payload_works(tmp_path, trace):
    """Or the tests below would show nothing."""
    for layout in ("zip", "legacy"):
        torch.load(hostile_weights(tmp_path / "x.pt", trace, layout), weights_only=False)
        assert trace.exists()
        trace.unlink()
    pickle.loads((hostile_weights(tmp_path / "x.pt", trace, "plain pickle")).read_bytes())
    trace.unlink()


def old_tar(path: Path) -> Path:
    """A file as torch wrote them before 0.2: a tar of pickles."""
    with tarfile.open(path, "w") as tar:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            member = tarfile.TarInfo(name)
            data = pickle.dumps({})
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def instantiator(path: Path, trace: Path) -> Path:
    """Lightning's load_from_checkpoint calls what a checkpoint names; ours are read as what they hold."""
    hyper = {"_instantiator": "stranger_module.Thing", "_class_path": "stranger_module.Thing", "config": {}}
    content = {"state_dict": {"w": torch.zeros(1)}, "hyper_parameters": hyper, "pytorch-lightning_version": "2.6.6"}
    torch.save(content, path)
    return path


FILES = {
    "zip": lambda path, trace: hostile_weights(path, trace, "zip"),
    "zip, and the environment asks for pickles": lambda path, trace: hostile_weights(path, trace, "zip"),
    "legacy": lambda path, trace: hostile_weights(path, trace, "legacy"),
    "plain pickle": lambda path, trace: hostile_weights(path, trace, "plain pickle"),
    "a tar of old": lambda path, trace: old_tar(path),
    "an instantiator": instantiator,
}
TEXT = ("--tasks=perplexity", "--data={0}/t.txt", "--device=cpu")
VIT = {"model": "diff_vit_debug", "num_classes": 2}


def command(*words):
    """A door that is a command: what it refuses is an error of status 1 or 2, without a traceback."""

    def call(path, shards):
        given = [word.format(path.parent, path) for word in words]
        status = cli.main(run_of(shards, *given[1:]) if given[0] == "fit" else given)
        raise ValueError(f"status {status} of {path}" if status in (1, 2) else "")

    return call


FILE_DOORS = {
    "open_model of OpenCLIP's": lambda path, _: open_model("CLIP-debug", path),
    "open_model of timm's": lambda path, _: open_model("diff_vit_debug", path),
    "language.load": lambda path, _: language.load(path),
    "ContrastiveModule": lambda path, _: ContrastiveModule("CLIP-debug", pretrained=str(path)),
    "ClassificationModule": lambda path, _: ClassificationModule(**VIT, model_args={"checkpoint_path": str(path)}),
    "generate": command("generate", "{1}", "--prompt=a"),
    "evaluate-language": command("evaluate-language", "{1}", *TEXT),
    "export": command("export", "{1}", "{0}/out"),
    "fit": command("fit", "--ckpt_path={1}"),
}


@pytest.mark.parametrize("door", FILE_DOORS)
def test_hostile_weights_are_refused_by_name_and_not_run(door, module, shards, tmp_path, trace, monkeypatch, capsys):
    (tmp_path / "t.txt").write_text("a b c")
    for kind, write in FILES.items():
        if door == "fit" and kind in ("legacy", "plain pickle", "a tar of old"):
            continue  # whose reader is that of the other doors, and each takes seconds
        path = write(tmp_path / "x.ckpt", trace)
        if "environment" in kind:
            monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        with pytest.raises((ValueError, pickle.UnpicklingError), match=r"x\.ckpt"):
            FILE_DOORS[door](path, shards)
        assert "Traceback" not in capsys.readouterr().err
        assert module not in sys.modules
        monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", raising=False)


def test_a_configuration_cannot_ask_for_pickles(shards, tmp_path, trace, capsys):
    path = hostile_weights(tmp_path / "x.ckpt", trace, "zip")
    hostile = tmp_path / "hostile.yaml"
    hostile.write_text(f"ckpt_path: {path}\nweights_only: false\n")
    refused(run_of(shards, f"--config={hostile}"), capsys, "weights_only is false", "leave it out")


def test_a_directory_of_shards_is_not_unpickled(shards, tmp_path, trace, capsys):
    """torch.distributed.checkpoint unpickles its .metadata, and what is no tensor in the shards."""
    directory = tmp_path / "sharded.ckpt"
    directory.mkdir()
    (directory / ".metadata").write_bytes(pickle.dumps(Payload(trace)))
    with pytest.raises(AttributeError):  # the payload works: Path.touch gives no metadata
        FileSystemReader(directory).read_metadata()
    assert trace.exists()
    trace.unlink()
    refused(run_of(shards, f"--ckpt_path={directory}"), capsys, "sharded.ckpt, a directory of shards", "dcp_to_torch")


# ---- what comes with models ----------------------------------------------------------------------------------------

DEEP = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"


def openclip_folder(folder: Path) -> Path:
    folder.mkdir()
    config = {"model_cfg": open_clip.get_model_config("CLIP-debug"), "preprocess_cfg": {}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return folder / "open_clip_pytorch_model.bin"


def timm_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architecture": "diff_vit_debug", "num_classes": 2}))
    return folder / "pytorch_model.bin"


def llama_folder(folder: Path) -> Path:
    make_llama("Llama", vocab_size=32, hidden_size=8, num_attention_heads=1).save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    return folder / "pytorch_model.bin"


def deep(name):
    def write(folder: Path, trace: Path) -> None:
        folder.mkdir()
        (folder / name).write_text(DEEP)
        for file in ("model.safetensors", "open_clip_model.safetensors"):
            save_file({"embed.weight": torch.zeros(1)}, folder / file)

    return write


OPEN = lambda path, _: open_model(path)  # noqa: E731
CLIP_DOORS = (OPEN, lambda path, _: ContrastiveModule(f"local-dir:{path}"))
VIT_DOORS = (OPEN, lambda path, _: ClassificationModule(f"local-dir:{path}", num_classes=2))
HF_DOORS = (command("evaluate-language", "hf:{1}", *TEXT),)
FOLDERS = {
    # what is in a folder: how it is written, and the doors that read it
    "OpenCLIP's pickle": (lambda f, t: hostile_weights(openclip_folder(f), t, "zip"), CLIP_DOORS),
    "OpenCLIP's old tar": (lambda f, t: old_tar(openclip_folder(f)), CLIP_DOORS),
    "OpenCLIP's tokenizer with code": (coded_openclip_folder, CLIP_DOORS),
    "timm's old tar": (lambda f, t: old_tar(timm_folder(f)), VIT_DOORS),
    "transformers' pickle": (lambda f, t: hostile_weights(llama_folder(f), t, "zip"), HF_DOORS),
    "transformers' old tar": (lambda f, t: old_tar(llama_folder(f)), HF_DOORS),
    "transformers' model with code": (lambda f, t: hugging_face_folder(f, t, False), HF_DOORS),
    "transformers' tokenizer with code": (lambda f, t: hugging_face_folder(f, t, True), HF_DOORS),
    "a deep config.json": (deep("config.json"), (*HF_DOORS, command("export", "{1}", "{0}/out"))),
    "a deep open_clip_config.json": (deep("open_clip_config.json"), (OPEN, command("adapt", "{1}", "{0}/out"))),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_hostile_folders_are_refused_by_name_and_not_run(kind, shards, tmp_path, trace, monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "t.txt").write_text("a b c")
    write, doors = FOLDERS[kind]
    write(tmp_path / "model", trace)
    for door in doors:
        with pytest.raises(ValueError, match="model"):
            door(tmp_path / "model", shards)
        assert "Traceback" not in capsys.readouterr().err


# ---- shards --------------------------------------------------------------------------------------------------------


@pytest.mark.quick("pickle", "jpg")
@pytest.mark.parametrize("suffix", HOSTILE_TYPES)
def test_pickles_in_shards_are_not_read(suffix, tmp_path, trace, capsys):
    directory = hostile_shards(tmp_path / "shards", trace, suffix)
    cli.main(["data", "check", str(directory), "--num_workers", "0"])
    train_tokenizer(["a b c"], 257).save(tmp_path / "tokenizer.json")
    words = [str(directory), str(tmp_path / "tokens"), str(tmp_path / "tokenizer.json"), "--max_bad_fraction=1"]
    assert cli.main(["data", "tokenize", *words, "--num_workers=0"]) == 0
    assert "4 documents" in capsys.readouterr().out
    if suffix != "jpg":
        write_manifest(directory)
        fit(run_of(directory, "--data.max_bad_fraction=1"))


@pytest.mark.parametrize("location", ["pipe:touch {0}", "gs+pipe://touch {0}"])
def test_commands_as_shards_are_refused(location, shards, tmp_path, trace, monkeypatch, capsys):
    """Through every command that reads shards; what webdataset rewrites by the environment stays as it is."""
    monkeypatch.setenv("GOPEN_REWRITE", f"s3://=pipe:touch {trace} ")
    location = location.format(trace)
    train_tokenizer(["a b c"], 257).save(tmp_path / "tokenizer.json")
    message = (
        f"shards must be at a path or a URL starting with http://, https://, s3://, gs://, hf://, got {location!r}"
    )
    refused(run_of(shards, f"--data.train=[{shards}, '{location}']"), capsys, message)
    words = ["data", "tokenize", location, str(tmp_path / "tokens"), str(tmp_path / "tokenizer.json")]
    refused(words, capsys, message)
    refused(["data", "tokenizer", location, str(tmp_path / "made.json")], capsys, message)
    with pytest.raises((ValueError, OSError)):
        ShardSet("s3://bucket/0.tar", ShardCache(tmp_path / "cache"))


@pytest.mark.parametrize("key", ["../../escaped", "/tmp/diffvision-escaped", "\x1b]0;x\x07/escaped", "link"])
def test_keys_that_point_elsewhere_write_nothing_there(key, tmp_path, capsys):
    """Keys are names in reports alone; links and devices in a tar are no samples."""
    root = tmp_path / "deep" / "down"
    directory = root / "shards"
    directory.mkdir(parents=True)
    with tarfile.open(directory / "0.tar", "w") as tar:
        for kind, target in ((tarfile.SYMTYPE, "/etc/passwd"), (tarfile.LNKTYPE, "../../escaped.txt")):
            link = tarfile.TarInfo("link.txt")
            link.type, link.linkname = kind, target
            tar.addfile(link)
        for suffix, data in (("png", png(np.zeros((32, 32, 3)))), ("txt", b"a b c")):
            member = tarfile.TarInfo(f"{key}.{suffix}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    train_tokenizer(["a b c"], 257).save(root / "tokenizer.json")
    tokens = [str(directory), str(root / "tokens"), str(root / "tokenizer.json"), "--max_bad_fraction=1"]
    before = {path for path in tmp_path.rglob("*") if path.parent != directory}
    cli.main(["data", "check", str(directory), "--num_workers", "0"])
    cli.main(["data", "tokenize", *tokens, "--num_workers=0"])
    assert "root:" not in capsys.readouterr().out
    written = set(tmp_path.rglob("*")) - before
    assert all(path.is_relative_to(root) or path.is_relative_to(tmp_path / "cache") for path in written)
    assert not Path("/tmp/diffvision-escaped.txt").exists()


# ---- bombs ---------------------------------------------------------------------------------------------------------


def test_a_sidecar_s_pickles_are_not_read(tmp_path, trace):
    write_tar(tmp_path / "0.tar", [{"__key__": "0", "txt": "a"}])
    shard_index(tmp_path / "0.tar")
    kept = sidecar(tmp_path / "0.tar", ".npz")
    with np.load(kept) as arrays:
        content = dict(arrays)
    np.savez(kept, **{**content, "types": np.array([Payload(trace)], dtype=object)})
    assert len(shard_index(tmp_path / "0.tar")) == 1


def test_a_member_in_gzip_is_no_member(tmp_path, capsys):
    """webdataset unpacks x.txt.gz without a limit: here it is of a type that nothing reads."""
    directory = tmp_path / "shards"
    directory.mkdir()
    write_tar(directory / "0.tar", [{"__key__": "0", "txt.gz": gzip.compress(bytes(30_000_000)), "txt": "a b"}])
    shards = ShardSet(str(directory))
    assert shards.members((0, 0)) == {"txt": b"a b", "txt.gz": b""}


# ---- depth ---------------------------------------------------------------------------------------------------------


def test_a_recipe_that_is_nested_too_deeply(tmp_path, capsys):
    hostile = tmp_path / "hostile.yaml"
    hostile.write_text("a: " + "[" * 5000 + "]" * 5000)
    refused(["fit", f"--config={hostile}"], capsys, "nested too deeply")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_is_nested_too_deeply(name, tmp_path):
    train_tokenizer(["a b c"], 257).save(tmp_path / "tokenizer.json")
    (tmp_path / name).write_text(DEEP)
    with pytest.raises(ValueError, match=f"{name} is not"):
        load_tokenizer(tmp_path)

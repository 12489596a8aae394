"""Files from strangers: each payload would leave a trace, and none is there once it has been refused.

One group a kind, through the commands and functions that users call.
"""

import importlib
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from safetensors.torch import save_file

from diffvision import cli
from diffvision.data.digits import png
from diffvision.data.packing import write_manifest, write_tar
from diffvision.evaluation.loading import load
from diffvision.generate import generate_text
from diffvision.models import language
from diffvision.training.classification import ClassificationModule
from diffvision.training.clip import ContrastiveModule
from diffvision.training.fit import FitCLI, fit

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning"),  # torch's, of pickles not written by it
]


class Payload:
    """Unpickled, it writes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


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
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / "stranger_module.py").write_text(
        f"""
import lightning.pytorch as pl
from pathlib import Path
Path({str(trace)!r}).touch()
class Thing(pl.LightningModule): pass
class Watcher(pl.Callback): pass
class Data(pl.LightningDataModule): pass
"""
    )
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
        "--trainer.enable_model_summary=false",
        *more,
    ]


def refused(command: list[str], capsys, *told: str) -> None:
    """The command ends with status 1 and one line that says all this."""
    assert cli.main(command) == 1
    error = capsys.readouterr().err
    assert "diffvision: error: " in error
    assert "Traceback" not in error
    for words in told:
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
        "--trainer.callbacks={0}.Watcher",
        "--trainer.callbacks=[{{class_path: {0}.Watcher}}]",
        "--trainer.logger.class_path={0}.Logger",
        "--trainer={{strategy: {{class_path: {0}.Strategy}}}}",
        "--trainer.plugins=[{{class_path: {0}.Plugin}}]",
        '--model={{"class_path": "{0}.Thing", "init_args": {{}}}}',
    ],
)
def test_a_class_path_outside_of_the_list_is_not_imported(words, module, shards, capsys):
    words = words.format(module)
    refused(
        run_of(shards, words), capsys, f"class_path '{module}.", "on the command line", f"add --allow {module} to the"
    )
    assert module not in sys.modules


@pytest.mark.parametrize("how", ["config", "second config", "sub-configuration", "of a sub-configuration", "nested"])
def test_a_class_path_in_a_file_is_named_with_the_file(how, module, shards, tmp_path, capsys):
    hostile, outer, inner = tmp_path / "hostile.yaml", tmp_path / "outer.yaml", tmp_path / "inner.yaml"
    hostile.write_text(f"trainer:\n  callbacks:\n    - class_path: {module}.Watcher\n")
    words = ["--config", str(hostile)]
    if how == "second config":
        outer.write_text("trainer:\n  max_steps: 1\n")
        words = ["--config", str(outer), f"--config={hostile}"]
    elif how == "sub-configuration":
        hostile.write_text(f"class_path: {module}.Thing\n")
        words = [f"--model={hostile}"]
    elif how == "of a sub-configuration":
        hostile.write_text(f"class_path: {module}.Thing\n")
        inner.write_text("model: hostile.yaml\n")
        words = [f"--config={inner}"]
    elif how == "nested":
        hostile.write_text(
            "model:\n  class_path: ContrastiveModule\n  init_args:\n    model: CLIP-debug\n"
            f"    optimizer:\n      class_path: {module}.Thing\n"
        )
    refused(run_of(shards, *words), capsys, f"'{module}.", f"in {hostile}", "--allow stranger_module")
    assert module not in sys.modules


@pytest.mark.parametrize("name", ["validate", "test"])
def test_the_other_commands_refuse_it_too(name, module, shards, capsys):
    refused([name, *run_of(shards)[1:5], f"--trainer.callbacks={module}.Watcher"], capsys, "--allow stranger_module")


def test_configurations_of_the_other_commands_import_nothing(module, tmp_path, capsys):
    hostile, options = tmp_path / "hostile.yaml", f"options:\n  class_path: {module}.Thing\n"
    hostile.write_text("checkpoint: x\ntasks: perplexity\n" + options)
    refused(["evaluate-language", f"--config={hostile}"], capsys, f"'{module}.Thing' in {hostile}", "--allow")
    hostile.write_text("model: CLIP-debug\ndata: x\n" + options)
    refused(["evaluate", f"--config={hostile}"], capsys, f"'{module}.Thing' in {hostile}")
    refused(["evaluate", "--model=CLIP-debug", f"--options={module}.Thing", "--data=x"], capsys)
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
    "path",
    [
        "os.system",
        "subprocess.Popen",
        "torch.hub.load",
        "torch.utils.cpp_extension.load",
        "diffvision.training.fit.sys.exit",
        "diffvision.__main__.main",
        "lightning.pytorch.callbacks.model_checkpoint.os.system",
        "lightning.pytorch.callbacks.LambdaCallback",
        "lightning.pytorch.callbacks.lambda_function.LambdaCallback",
    ],
)
def test_callables_that_run_things_are_refused(path, shards):
    with pytest.raises(ValueError, match=r"class_path .* was not imported"):
        fit(run_of(shards, f"--trainer.callbacks={path}"))


def test_allow_adds_a_prefix_for_that_command_alone(module, shards, trace, capsys):
    """And a module that is allowed is imported: the payload works."""

    class Parsed(FitCLI):
        def _run_subcommand(self, subcommand):
            pass

    for words in (["--allow", module], [f"--allow={module}."]):
        made = Parsed([*words, *run_of(shards, f"--trainer.callbacks={module}.Watcher")])
        assert any(type(callback).__name__ == "Watcher" for callback in made.trainer.callbacks)
        assert trace.exists()
        trace.unlink()
        sys.modules.pop(module)
    refused(run_of(shards, f"--trainer.callbacks={module}.Watcher"), capsys, "--allow stranger_module")
    for wrong in ("*", "", "no-name", "jsonargparse"):
        with pytest.raises(ValueError, match="--allow is"):
            fit([*run_of(shards), f"--allow={wrong}"])


def test_a_file_cannot_allow_itself(module, shards, tmp_path, capsys):
    hostile = tmp_path / "hostile.yaml"
    hostile.write_text(f"allow: {module}\nmodel:\n  class_path: {module}.Thing\n")
    with pytest.raises((SystemExit, ValueError)):
        fit(["fit", f"--config={hostile}"])
    assert module not in sys.modules


@pytest.mark.parametrize(
    "text",
    [
        "seed_everything: !!python/object/apply:pathlib.Path.touch [{0}]\n",
        "seed_everything: !!python/object/new:pathlib.Path [{0}]\n",
        "model: !!python/name:os.system\n",
        "model: !!python/module:stranger_module\n",
    ],
)
@pytest.mark.parametrize("flag", ["--config={0}", "--model={0}"])
def test_yaml_makes_no_objects(text, flag, module, trace, tmp_path, capsys):
    hostile = tmp_path / "hostile.yaml"
    hostile.write_text(text.format(trace))
    with pytest.raises(SystemExit):
        fit(["fit", flag.format(hostile)])
    assert "could not determine a constructor for the tag" in capsys.readouterr().err
    assert module not in sys.modules


def test_values_are_not_looked_up_in_the_environment(shards, monkeypatch, capsys):
    """Neither resolvers nor variables: what is written is what is meant."""
    monkeypatch.setenv("PL_FIT__MODEL", "stranger_module.Thing")
    monkeypatch.setenv("SECRET", "x")
    refused(run_of(shards, "--data.train=${oc.env:SECRET}.tar"), capsys, "${oc.env:SECRET}.tar")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:{0}/c.yaml", "memory://c.yaml", "simplecache::http://127.0.0.1:{0}/c"]
)
def test_configurations_are_not_fetched(url, server, capsys):
    with pytest.raises(SystemExit):
        fit(["fit", "--config", url.format(server.server_port)])
    assert "not exist" in capsys.readouterr().err


# ---- weights -------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path, trace):
    """A web server of this folder; any request is a failure."""
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    asked = []

    class Noting(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Noting)
    threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()
    assert asked == []


URLS = ["http://127.0.0.1:{0}/x.ckpt", "https://127.0.0.1:{0}/x.pt", "s3://bucket/x.ckpt", "memory://x.ckpt",
        "file:///x.ckpt", "simplecache::http://127.0.0.1:{0}/x.ckpt", "data:;base64,gASVAA==", "hf://x/y"]  # fmt: skip


@pytest.mark.parametrize("url", URLS)
def test_checkpoints_are_not_fetched(url, server, shards, tmp_path, capsys):
    url = url.format(server.server_port)
    told = "checkpoints are not loaded from URLs; download it, compare its sha256"
    refused(run_of(shards, f"--ckpt_path={url}"), capsys, "ckpt_path is", told)
    refused(run_of(shards, f"--model.pretrained={url}"), capsys, "pretrained is", told)
    refused(["generate", f"--checkpoint={url}", "--prompt=a"], capsys, told)
    for call in (
        lambda: load("CLIP-debug", url),
        lambda: language.load(url),
        lambda: language.load(Path(url)),
        lambda: language.tokenizer_beside(url),
        lambda: ClassificationModule("diff_vit_debug", num_classes=2, model_args={"checkpoint_path": url}),
        lambda: ClassificationModule(
            "diff_vit_debug", num_classes=2, model_args={"pretrained": True, "pretrained_cfg_overlay": {"url": url}}
        ),
    ):
        with pytest.raises(ValueError, match="checkpoints are not loaded from URLs"):
            call()


def test_checkpoints_of_registries_are_not_fetched(shards, capsys):
    refused(run_of(shards, "--ckpt_path=registry:model:version:v2"), capsys, "ckpt_path is 'registry:")


def hostile_weights(path: Path, trace: Path, layout: str) -> Path:
    """A checkpoint with a payload in it, in one of the layouts that torch has written."""
    content = {"state_dict": {"w": torch.zeros(1)}, "hyper_parameters": {"config": {}}, "x": Payload(trace)}
    if layout == "plain pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=layout == "zip")
    return path


def test_the_payload_works(tmp_path, trace):
    """Or the tests below would show nothing."""
    for layout in ("zip", "legacy"):
        torch.load(hostile_weights(tmp_path / "x.pt", trace, layout), weights_only=False)
        assert trace.exists()
        trace.unlink()
    pickle.loads((hostile_weights(tmp_path / "x.pt", trace, "plain pickle")).read_bytes())
    trace.unlink()


@pytest.mark.parametrize("layout", ["zip", "legacy", "plain pickle"])
@pytest.mark.parametrize("forced", [False, True], ids=["", "environment asks for pickles"])
def test_pickles_in_checkpoints_are_not_run(layout, forced, shards, tmp_path, trace, monkeypatch, capsys):
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = hostile_weights(tmp_path / "x.ckpt", trace, layout)
    for call in (
        lambda: load("CLIP-debug", path),
        lambda: load("diff_vit_debug", path),
        lambda: language.load(path),
        lambda: generate_text(str(path), "a"),
    ):
        with pytest.raises(ValueError, match=r"checkpoint .*x\.ckpt (holds|is damaged)"):
            call()
    for call in (
        lambda: fit(run_of(shards, f"--ckpt_path={path}")),
        lambda: ContrastiveModule("CLIP-debug", pretrained=str(path)),
        lambda: ClassificationModule("diff_vit_debug", num_classes=2, model_args={"checkpoint_path": str(path)}),
    ):
        with pytest.raises(Exception, match=r"(?i)weights|pickle|unpickl|checkpoint"):
            call()


def test_a_configuration_cannot_ask_for_pickles(shards, tmp_path, trace, capsys):
    path = hostile_weights(tmp_path / "x.ckpt", trace, "zip")
    hostile = tmp_path / "hostile.yaml"
    hostile.write_text(f"ckpt_path: {path}\nweights_only: false\n")
    refused(run_of(shards, f"--config={hostile}"), capsys, "weights_only is false", "leave it out")


def test_commands_tell_of_a_hostile_checkpoint(shards, tmp_path, trace, capsys):
    path = hostile_weights(tmp_path / "x.ckpt", trace, "zip")
    refused(["generate", f"--checkpoint={path}", "--prompt=a"], capsys, "more than tensors and plain values")
    text = tmp_path / "t.txt"
    text.write_text("a b c")
    refused(
        ["evaluate-language", f"--checkpoint={path}", "--tasks=perplexity", f"--data={text}", "--device=cpu"],
        capsys,
        "more than tensors and plain values",
    )


# ---- what comes with models ----------------------------------------------------------------------------------------


def test_an_openclip_folder_cannot_ask_for_its_code(tmp_path, trace, monkeypatch):
    """Its tokenizer's settings go to transformers, trust_remote_code with them."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "evil.py").write_text(f"from pathlib import Path\nPath({str(trace)!r}).touch()\n")
    coded = {"AutoConfig": "evil.C", "AutoTokenizer": ["evil.T", None]}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": coded}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T", "auto_map": coded}))
    config = open_clip.get_model_config("CLIP-debug")
    config["text_cfg"] |= {"hf_tokenizer_name": str(folder), "tokenizer_kwargs": {"trust_remote_code": True}}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    save_file(open_clip.create_model("CLIP-debug").state_dict(), folder / "open_clip_model.safetensors")
    for call in (load, ContrastiveModule):
        with pytest.raises(ValueError, match="has trust_remote_code, which would run code"):
            call(f"local-dir:{folder}")

"""Hostile files, each of which would make a file, the trace, if what is in it were run."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from pathlib import Path

import numpy as np
import open_clip
import torch
from safetensors.torch import save_file

from diffvision.data.datasets.digits import png
from diffvision.data.shards.writer import write_tar


class Payload:
    """Unpickled, it writes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


def stranger(directory: Path, trace: Path) -> str:
    """Write a module that makes the file when it is imported, with a class of every kind for a configuration."""
    directory.mkdir()
    (directory / "stranger_module.py").write_text(
        f"""
import lightning.pytorch as pl
from pathlib import Path
Path({str(trace)!r}).touch()
class Thing(pl.LightningModule): pass
class Watcher(pl.Callback): pass
class Data(pl.LightningDataModule): pass
"""
    )
    return "stranger_module"


def hostile_weights(path: Path, trace: Path, layout: str) -> Path:
    """Write a checkpoint with a payload in it, in one of the layouts that torch has written."""
    content = {"state_dict": {"w": torch.zeros(1)}, "hyper_parameters": {"config": {}}, "x": Payload(trace)}
    if layout == "plain pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=layout == "zip")
    return path


def coded_openclip_folder(folder: Path, trace: Path) -> Path:
    """Write a model in OpenCLIP's layout whose tokenizer brings code."""
    folder.mkdir()
    (folder / "evil.py").write_text(f"from pathlib import Path\nPath({str(trace)!r}).touch()\n")
    coded = {"AutoConfig": "evil.C", "AutoTokenizer": ["evil.T", None]}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": coded}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T", "auto_map": coded}))
    config = open_clip.get_model_config("CLIP-debug")
    config["text_cfg"] |= {"hf_tokenizer_name": str(folder), "tokenizer_kwargs": {"trust_remote_code": True}}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    save_file(open_clip.create_model("CLIP-debug").state_dict(), folder / "open_clip_model.safetensors")
    return folder


def hugging_face_folder(folder: Path, trace: Path, tokenizer: bool) -> Path:
    folder.mkdir()
    (folder / "evil.py").write_text(f"from pathlib import Path\nPath({str(trace)!r}).touch()\n")
    coded = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", "evil.T"]}
    # A model like any other, with code for its tokenizer.
    if tokenizer:
        from transformers import LlamaConfig, LlamaForCausalLM

        small = LlamaConfig(
            vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
        LlamaForCausalLM(small).save_pretrained(folder)
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T", "auto_map": coded}))
    else:
        config = {"model_type": "evil", "auto_map": coded, "trust_remote_code": True}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


HOSTILE_TYPES = ("pickle", "pth", "foo.pyd", "pyd.gz", "npy", "jpg")


def hostile_shards(directory: Path, trace: Path, suffix: str) -> Path:
    """Write good samples, each with a member that is a payload; the last has no other."""
    directory.mkdir()
    data = pickle.dumps(Payload(trace))
    if suffix == "pth":
        file = io.BytesIO()
        torch.save(Payload(trace), file)
        data = file.getvalue()
    elif suffix == "npy":
        file = io.BytesIO()
        np.save(file, np.array([Payload(trace)], dtype=object), allow_pickle=True)
        data = file.getvalue()
    elif suffix.endswith(".gz"):
        data = gzip.compress(data)
    good = [{"__key__": f"{i}", "png": png(np.zeros((32, 32, 3))), "txt": "a b c"} for i in range(4)]
    write_tar(directory / "0.tar", [*({**s, suffix: data} for s in good), {"__key__": "x", suffix: data}])
    return directory

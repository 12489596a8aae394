"""The page "CC12M on eight GPUs": its commands, from the download to the comparison, run on a miniature.

They are taken from the page and run by bash, with the changes in `MINIATURE`. Programs are stand-ins: img2dataset and
hf write what they would have downloaded, sbatch runs the script, again where it was requeued, and srun starts two ranks
with SLURM's environment and, in the first epochs of the first job, sends them the signal that the script asks for.
"""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from img2dataset_files import jpeg
from PIL import Image

from diffvision.data.datasets.mmvp import PATTERNS
from diffvision.data.shards.writer import write_evaluation_split
from diffvision.evaluation.imagenet import imagenet_names

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "cc12m.md"
MINIATURE = {
    "--num_workers 16": "--num_workers 2",
    "imagenetv2 imagenet-a imagenet-r imagenet_sketch objectnet": "imagenetv2",
    "mscoco_captions flickr8k flickr30k": "flickr8k",
    "vtab-caltech101 vtab-cifar10 vtab-cifar100 vtab-dtd fgvc_aircraft vtab-flowers food101 vtab-pets sun397": (
        "vtab-caltech101"
    ),
    "for seed in 0 1 2": "for seed in 0",
    "--config clip/cc12m_$1.yaml": "--config clip/cc12m_$1.yaml --config mini_$1.yaml",
    "--trainer.fast_dev_run 2": "--config mini_diffclip.yaml --trainer.fast_dev_run 2 --trainer.devices 1",
    "--tasks linear_probe,few_shot": "--tasks linear_probe,few_shot --options.episodes 20",
}
"""What the page says -> what runs here; each must be on the page."""
SHARDS, PER_SHARD, EPOCHS, CLASSES = 40, 10, 4, 20
STUBS = {
    "img2dataset": """
import sys
sys.path.insert(0, TESTS)
from img2dataset_files import write_img2dataset
words = sys.argv[1:]
options = dict(zip(words[::2], words[1::2], strict=True))
assert options["--output_format"] == "webdataset"
captions = open(options["--url_list"]).read().splitlines()
write_img2dataset(options["--output_folder"], captions, failed={3: "HTTP Error 404: Not Found"})
""",
    "hf": """
import sys
sys.path.insert(0, TESTS)
from pathlib import Path
from test_cc12m_page import write_download
words = sys.argv[1:]
assert [words[0], *words[2:5]] == ["download", "--repo-type", "dataset", "--local-dir"]
write_download(words[1], Path(words[5]))
""",
    "sbatch": """
import os, pathlib, re, subprocess, sys
jobs = pathlib.Path("jobs")
jobs.mkdir(exist_ok=True)
words = sys.argv[1:]
name = re.fullmatch("--job-name=(.+)", words.pop(0))[1]
options = " ".join(re.findall("^#SBATCH (.*)", pathlib.Path(words[0]).read_text(), flags=re.M))
assert "--requeue" in options
number = str(4711 + len(list(jobs.glob("*.out"))))
signal = re.search(r"--signal=(\\w+)@", options)[1]
environment = os.environ | {"SLURM_JOB_ID": number, "SLURM_JOB_NAME": name, "SIGNAL": signal}
for restart in ("0", "1"):
    with open(jobs / f"{number}.out", "a") as out:
        environment["SLURM_RESTART_COUNT"] = restart
        done = subprocess.run(["bash", *words], env=environment, stdout=out, stderr=out)
    if not (jobs / f"{number}.requeued").exists() or restart == "1":
        break
print("Submitted batch job", number)
sys.exit(done.returncode)
""",
    "srun": """
import os, signal, subprocess, sys, threading
words = [word for word in sys.argv[1:] if not word.startswith("-") or word != "--kill-on-bad-exit=1"]
of_job = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODELIST": "127.0.0.1"}
ranks = []
for rank in range(2):
    own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
    ranks.append(subprocess.Popen(words, env=os.environ | of_job | own, stdout=subprocess.PIPE, text=True))
interrupts = os.environ["SLURM_JOB_ID"] == "4711" and os.environ["SLURM_RESTART_COUNT"] == "0"
for line in ranks[0].stdout:
    print(line, end="", flush=True)
    if interrupts and line.startswith("epoch 1: "):
        interrupts = False
        for rank in ranks:
            rank.send_signal(getattr(signal, os.environ["SIGNAL"]))
print(ranks[1].stdout.read())
sys.exit(max(rank.wait() for rank in ranks))
""",
    "scontrol": """
import pathlib, sys
word, number = sys.argv[1:]
assert word == "requeue"
pathlib.Path("jobs", f"{number}.requeued").touch()
""",
}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)


def picture(path, seed, size=(24, 16)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)).save(path)
    return path


def write_download(repository, folder):
    """Write a small part of a repository of the Hub as `hf download` does: its files, and a folder of its own."""
    (folder / ".cache" / "huggingface" / "download").mkdir(parents=True)
    if repository == "MMVP/MMVP_VLM":
        write_mmvp(folder)
        return
    name = repository.removeprefix("clip-benchmark/wds_")
    if name == "flickr8k":
        rows = [{"jpg": jpeg(n), "txt": f"a photo of {n} things\n{n} things"} for n in range(12)]
        texts = {"dataset_type": ["retrieval"]}
    else:
        names = imagenet_names()[:CLASSES] if name.startswith("imagenet") else [f"class {n}" for n in range(6)]
        rows = [{"jpg": jpeg(n), "cls": str(n % len(names))} for n in range(len(names) * 6)]
        texts = {"classnames": names, "templates": ["a photo of a {c}."]}
    for split in ("train", "test") if name.startswith("vtab") else ("test",):
        samples = ({"__key__": f"s{number:07d}", **row} for number, row in enumerate(rows))
        write_evaluation_split(folder / split, samples, **texts)


def write_mmvp(folder):
    questions = [["number", "type", "statement"]]
    for kind in PATTERNS:
        for _ in range(2):
            number = len(questions)
            questions.append([str(number), kind, f"thing {number}"])
            picture(folder / "MLLM_VLM Images" / kind / f"{number}.jpg", number)
    (folder / "Questions.csv").write_text("\n".join(map(",".join, questions)))


def write_recipes(folder):
    """Write the miniature's settings: a small model, not compiled, 25 steps an epoch, two ranks on the CPU."""
    for name, model in (("clip", "CLIP-debug"), ("diffclip", "DiffCLIP-debug")):
        trainer = {"max_epochs": EPOCHS, "accelerator": "cpu", "devices": 2, "precision": "32-true"}
        module = {"init_args": {"model": model, "compile": False, "optimizer": {"warmup_epochs": 0.5}}}
        content = {"model": module, "data": {"init_args": {"batch_size": 16, "num_workers": 0}}, "trainer": trainer}
        (folder / f"mini_{name}.yaml").write_text(yaml.safe_dump(content))


@pytest.fixture
def bash(tmp_path):
    """A function that runs one of the page's blocks, in a folder with the miniature and the stand-ins on its path."""
    for name, code in STUBS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{sys.executable}\nTESTS = {str(Path(__file__).parent)!r}\n{code}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "bin" / "diffvision").write_text(f'#!/bin/sh\nexec {sys.executable} -m diffvision "$@"\n')
    (tmp_path / "bin" / "diffvision").chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def run(block):
        for theirs, ours in MINIATURE.items():
            block = block.replace(theirs, ours)
        command = ["bash", "-e", "-o", "pipefail", "-c", block]
        done = subprocess.run(command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True)
        logs = "".join(path.read_text()[-3000:] for path in tmp_path.glob("jobs/*.out"))
        assert done.returncode == 0, f"{block}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{logs}"
        return done.stdout

    return run


def test_the_miniature_changes_what_is_on_the_page():
    assert [text for text in MINIATURE if text not in PAGE.read_text()] == []


@pytest.mark.nightly
def test_every_command_of_the_page_on_a_miniature(tmp_path, bash):
    names = imagenet_names()[:CLASSES]
    captions = [f"a photo of a {names[number % CLASSES]}" for number in range(SHARDS * PER_SHARD)]
    (tmp_path / "cc12m.parquet").write_text("\n".join(captions))
    write_recipes(tmp_path)
    (script,) = [block for block in blocks("bash") if "#SBATCH" in block]
    (loggers,) = [block for block in blocks("bash") if "WandbLogger" in block]
    (tmp_path / "train.sh").write_text(script.replace(*next(item for item in MINIATURE.items() if "$1" in item[0])))
    for block in blocks("bash"):
        if block not in (script, loggers):
            bash(block)
    assert len(list((tmp_path / "data" / "cc12m").glob("*.tar"))) == SHARDS

    fit = script[script.index("diffvision fit") :].rstrip()
    config = bash(f"set -- clip 0\n{fit} \\\n{' '.join(loggers.splitlines())} --print_config")
    assert [logger["class_path"].rpartition(".")[2] for logger in yaml.safe_load(config)["trainer"]["logger"]] == [
        "CSVLogger",
        "WandbLogger",
        "TensorBoardLogger",
    ]

    for model in ("clip", "diffclip"):
        run = tmp_path / "runs" / f"cc12m_{model}" / "seed0"
        final = torch.load(run / "checkpoints" / "final.ckpt", weights_only=True)
        assert final["global_step"] == EPOCHS * ((SHARDS * PER_SHARD - 1) // 16)
    log = (tmp_path / "jobs" / "4711.out").read_text()
    saved = re.search(r"SIGUSR1: saved \S+ at step (\d+)", log)
    assert f"from step {int(saved[1])} on" in log
    assert f"resumed from step {saved[1]}" in log or f"trained from step {saved[1]}" in log
    assert [path.name for path in tmp_path.glob("jobs/*.requeued")] == ["4711.requeued"]
    compared = json.loads((tmp_path / "table.json").read_text())
    assert len(compared["models"]) == 2
    metrics = [row["metric"] for row in compared["metrics"]]
    for name in ("imagenet", "imagenetv2", "flickr8k", "mmvp"):
        assert any(f"/{name}/" in metric for metric in metrics), metrics

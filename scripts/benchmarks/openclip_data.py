"""OpenCLIP's training data pipeline as a program: an epoch for each line it is given, for `bench_data.py`.

    PYTHON scripts/benchmarks/openclip_data.py SHARDS SAMPLES SIZE WORKERS BATCH

PYTHON is one with open_clip_torch and webdataset 0.2.86, the last version that OpenCLIP works with: later ones put a
mark between shards that its grouping takes for a sample. It ends with a line "end", and answers each other one with
{"samples": n, "seconds": s, "cpu": seconds of the processor, with the workers'}.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import open_clip
import torch

MODEL = "ViT-B-32"


def transform(size: int):
    """Return OpenCLIP's for training: a random crop resized (bicubic), RGB, normalised."""
    return open_clip.image_transform(
        size, is_train=True, mean=open_clip.OPENAI_DATASET_MEAN, std=open_clip.OPENAI_DATASET_STD
    )


def cpu_seconds() -> float:
    """Return the processor time of this process and of its children that run, such as a loader's workers (Linux)."""
    total = time.process_time()
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def main() -> None:
    import webdataset
    from open_clip_train.data import get_wds_dataset

    shards, samples, size, workers, batch = sys.argv[1], *map(int, sys.argv[2:])
    arguments = SimpleNamespace(
        train_data=shards,
        train_num_samples=samples,
        train_data_upsampling_factors=None,
        dataset_resampled=False,
        seed=0,
        workers=workers,
        batch_size=batch,
        world_size=1,
    )
    torch.set_num_threads(1)
    data = get_wds_dataset(arguments, transform(size), is_train=True, tokenizer=open_clip.get_tokenizer(MODEL))
    print(json.dumps({"webdataset": webdataset.__version__, "open_clip": open_clip.__version__}), flush=True)
    for epoch, line in enumerate(sys.stdin):
        if line.strip() == "end":
            break
        data.set_epoch(epoch)
        start, before = time.perf_counter(), cpu_seconds()
        count = sum(len(images) for images, _ in data.dataloader)
        answer = {"samples": count, "seconds": time.perf_counter() - start, "cpu": cpu_seconds() - before}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

"""What `run_openclip.py` makes beside the digits: images under names of ImageNet, and weights for LiT to start from."""

import tarfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import open_clip
import torch

from diffvision.data.shards.writer import write_evaluation_split, write_shards
from diffvision.models.checkpoint import read_checkpoint

NAMES = open_clip.IMAGENET_CLASSNAMES


def samples(shards: Path) -> Iterator[dict[str, bytes]]:
    """{"__key__", "png", "cls", "txt"} of each sample, in order."""
    for shard in sorted(shards.glob("*.tar")):
        with tarfile.open(shard) as archive:
            sample: dict = {}
            for member in archive:
                key, _, ending = member.name.partition(".")
                if sample and sample["__key__"] != key:
                    yield sample
                    sample = {}
                sample |= {"__key__": key, ending: archive.extractfile(member).read()}
            yield sample


def as_imagenet(digits: Path, folder: Path) -> None:
    """Digits with the names of ImageNet's first ten classes, since OpenCLIP's zero-shot evaluation knows no others.

    `folder/train` has 3,000 of them as shards with captions, `folder/images` the test split as timm and torchvision
    want folders, `folder/zero_shot` the same as an evaluation folder with OpenCLIP's 1,000 names and 80 templates.
    """
    kept = ({"__key__": s["__key__"], "png": s["png"], "txt": _caption(s)} for s in samples(digits / "train"))
    write_shards(folder / "train", islice(kept, 3000), per_shard=1500)
    test = [*samples(digits / "zero_shot/test")]
    for sample in test:
        path = folder / "images" / sample["cls"].decode().strip() / f"{sample['__key__']}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample["png"])
    evaluation = folder / "zero_shot"
    write_evaluation_split(evaluation / "test", ({k: s[k] for k in ("__key__", "png", "cls")} for s in test))
    (evaluation / "classnames.txt").write_text("\n".join(NAMES) + "\n")
    templates = [template("{c}") for template in open_clip.OPENAI_IMAGENET_TEMPLATES]
    (evaluation / "zeroshot_classification_templates.txt").write_text("\n".join(templates) + "\n")


def _caption(sample: dict[str, bytes]) -> str:
    return f"a photo of a {NAMES[int(sample['cls'])]}."


def with_tower(model: str, tower: Path, weights: Path) -> None:
    """Writes the weights of an OpenCLIP model: its image tower from a classifier's checkpoint, all else untrained."""
    torch.manual_seed(0)
    made = open_clip.create_model(model)
    state = {name: value for name, value in read_checkpoint(tower).state.items() if not name.startswith("head.")}
    made.visual.trunk.load_state_dict(state)
    torch.save(made.state_dict(), weights)

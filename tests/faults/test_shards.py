"""Shards of an unusual form, and shards that vanish during an epoch: pairs stay right and all samples are counted."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from diffvision.data import CaptionMember, ImageMember, ImageText, Limits, ShardLoader, ShardSet
from diffvision.data.images.image_data import to_float
from diffvision.data.shards.remote import ShardCache
from diffvision.data.shards.writer import write_manifest, write_tar

pytestmark = pytest.mark.faults
SHARDS, EACH = 4, 16


def numbered(number: int) -> dict:
    """Sample `number`: an image of that grey, and a caption with it."""
    data = io.BytesIO()
    Image.new("RGB", (8, 8), (number,) * 3).save(data, "PNG")
    return {"__key__": f"{number:03d}", "cls": "0", "png": data.getvalue(), "txt": str(number)}


def write_data(change: Callable[[dict], dict] = dict, shards: int = SHARDS) -> None:
    """Write shards whose keys are the same in each, as datasets often have it."""
    Path("shards").mkdir()
    for shard in range(shards):
        samples = [change(numbered(shard * EACH + row) | {"__key__": f"{row:03d}"}) for row in range(EACH)]
        write_tar(Path(f"shards/{shard}.tar"), samples)
    write_manifest("shards")


def numbers(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[int(caption)] for caption in captions])


def loader_of(**settings: object) -> ShardLoader:
    kind = ImageText(ImageMember(to_float), CaptionMember(), numbers)
    settings = {"num_workers": 0, "limits": Limits(max_bad_fraction=1.0)} | settings
    return ShardLoader(ShardSet("shards", ShardCache("cache")), kind, 8, **settings)


def seen_in_an_epoch(loader: ShardLoader) -> list[int]:
    """Return the numbers seen; AssertionError for a wrong pair or an account that does not add up."""
    seen: list[int] = []
    for batch in loader:
        drawn = (batch["image"][:, 0, 0, 0] * 255).round().long().tolist()
        written = batch["text"][:, 0].tolist()
        assert drawn == written
        seen += written
    report = loader.report
    assert report.seen + report.bad + report.tail == report.total == len(loader.shards), report.summary()
    return seen


FORMS = {
    "a key many times": lambda sample: sample | {"__key__": "same"},
    "captions before images": lambda sample: {key: sample[key] for key in ("__key__", "txt", "png")},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_sample_is_seen_with_its_own_caption(form):
    write_data(FORMS[form])
    assert sorted(seen_in_an_epoch(loader_of())) == list(range(SHARDS * EACH))


def test_members_of_a_sample_that_lie_apart_are_never_paired():
    write_data()
    samples = [numbered(row) for row in range(EACH)]
    images = [{"__key__": sample["__key__"], "png": sample["png"]} for sample in samples]
    texts = [{"__key__": sample["__key__"], "txt": sample["txt"]} for sample in samples]
    write_tar(Path("shards/0.tar"), images + texts)
    write_manifest("shards")
    loader = loader_of()
    seen = seen_in_an_epoch(loader)
    assert set(seen) == set(range(EACH, SHARDS * EACH))
    skipped = {reason.partition(":")[0]: count for reason, count in loader.report.skipped.items()}
    assert skipped == {"missing caption": EACH, "missing image": EACH}


def test_fewer_shards_than_ranks_and_workers_are_shared():
    write_data(shards=1)
    ranks = [loader_of(rank=rank, world_size=2, num_workers=2) for rank in range(2)]
    seen = [number for loader in ranks for batch in loader for number in batch["text"][:, 0].tolist()]
    assert sorted(seen) == list(range(EACH))


def test_shards_that_vanish_during_an_epoch_are_counted():
    write_data()
    loader = loader_of(window=1, num_workers=1)
    batches = iter(loader)
    next(batches)
    # Workers may be writing notes next to the shards.
    for shard in Path("shards").glob("*.tar"):
        shard.unlink()
    for _ in batches:
        pass
    report = loader.report
    assert set(report.skipped) == {"unreadable shard"}, report.summary()
    assert report.seen + report.bad == report.total


def test_links_under_the_names_of_manifests_are_not_written_through():
    write_tar(Path("0.tar"), [{"__key__": "0", "txt": "a"}])
    Path("elsewhere").mkdir()
    for name in ("manifest.json.part", "sizes.json.part"):
        Path(name).symlink_to("elsewhere/escaped")
    write_manifest(".")
    assert not list(Path("elsewhere").iterdir())

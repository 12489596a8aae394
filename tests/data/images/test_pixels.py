"""uint8 pixels: the normalised bits of the transform itself, torchvision's within a level, bad images as before."""

import random

import lightning.pytorch as pl
import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from timm.data import create_transform
from torchvision import transforms
from torchvision.transforms import Compose, InterpolationMode, Normalize, Resize, ToTensor
from training_fits import trainer

from diffvision.data import ImageLabelData, ImageTextData
from diffvision.data.images.decode import decode_image
from diffvision.data.images.image_data import to_float
from diffvision.data.images.pixels import Pixels, ends_with_normalize
from diffvision.data.shards.sample import BadSample
from tests.data.conftest import encode

MEAN, STD = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
TRAIN = {
    "open_clip": open_clip.image_transform(64, True, MEAN, STD),
    "open_clip, small crops": open_clip.image_transform(64, True, MEAN, STD, aug_cfg={"scale": (0.05, 1.0)}),
    "timm, colours": create_transform(64, is_training=True, color_jitter=0.3),
    "timm": create_transform(64, is_training=True, mean=(0.1, 0.2, 0.3), interpolation="random"),
    "timm, RandAugment": create_transform(64, is_training=True, auto_augment="rand-m9-mstd0.5-inc1"),
}
EVALUATION = open_clip.image_transform(64, False, MEAN, STD)


@pytest.fixture(scope="module")
def photo():
    return Image.fromarray(load_sample_image("china.jpg")).resize((320, 213))


def seeded(function, *arguments):
    """Call a transform with fixed random numbers."""
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)
    return function(*arguments)


def levels(a, b):
    return (a.int() - b.int()).abs()


def within_a_level(difference):
    """Return whether nearly all values differ by a level or none: an edge that overshoots 0 or 255 may differ more."""
    few = (difference > 0).float().mean() < 0.08 and (difference > 1).float().mean() < 1e-3
    return few and difference.max() <= 8


@pytest.mark.parametrize("name", TRAIN)
def test_normalised_pixels_are_the_bits_of_the_transform(photo, name):
    data = encode(photo, "JPEG", quality=90)
    read = Pixels(TRAIN[name])
    expected = seeded(TRAIN[name], decode_image(data))
    found = seeded(read.read, data)
    assert found.dtype == torch.uint8
    assert torch.equal(read.normalize(found[None])[0], expected)
    assert torch.equal(seeded(Pixels(TRAIN[name], on_device=False).read, data), expected)


def test_every_level_is_normalised_to_the_same_bits():
    image = Image.fromarray(np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3))
    read = Pixels(Compose([ToTensor(), Normalize(MEAN, STD)]))
    assert torch.equal(read.normalize(read(image)[None])[0], Compose([ToTensor(), Normalize(MEAN, STD)])(image))


@pytest.mark.parametrize("name", [*TRAIN, "evaluation"])
def test_torchvision_makes_the_same_crops_within_a_level(photo, name):
    transform = TRAIN.get(name, EVALUATION)
    data = encode(photo, "JPEG", quality=90)
    expected, found = (seeded(Pixels(transform, decoder).read, data) for decoder in ("pillow", "torchvision"))
    difference = levels(found, expected)
    if "RandAugment" in name or "colours" in name:  # which enlarge differences
        assert difference.float().mean() < 1
    else:
        assert within_a_level(difference)


@pytest.mark.parametrize("kind", ["grey", "CMYK", "rotated", "transparent PNG", "WebP"])
def test_other_images_are_read_as_before(photo, kind):
    exif = Image.Exif()
    exif[0x0112] = 6
    clear = photo.convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(photo.size))
    data = {
        "grey": lambda: encode(photo.convert("L"), "JPEG"),
        "CMYK": lambda: encode(photo.convert("CMYK"), "JPEG"),
        "rotated": lambda: encode(photo, "JPEG", exif=exif),
        "transparent PNG": lambda: encode(clear),
        "WebP": lambda: encode(photo, "WEBP"),
    }[kind]()
    transform = TRAIN["open_clip"]
    expected, found = (seeded(Pixels(transform, one).read, data) for one in ("pillow", "torchvision"))
    assert within_a_level(levels(found, expected))


def test_bad_images_are_bad_for_the_same_reason(photo):
    data = encode(photo, "JPEG", quality=90)
    draw = random.Random(0)
    cases = [b"", b"no image", data[: len(data) // 2], data[:-1], data[:300], b"GIF89a" + data]
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(draw.choice((1, 5, 50))):
            damaged[draw.randrange(len(data))] = draw.randrange(256)
        cases.append(bytes(damaged[: draw.choice((len(data), draw.randrange(len(data))))]))

    def outcome(one, case):
        try:
            return tuple(Pixels(EVALUATION, one).read(case).shape)
        except BadSample as reason:
            return str(reason)

    outcomes = [(outcome("pillow", case), outcome("torchvision", case)) for case in cases]
    assert all(ours == theirs for ours, theirs in outcomes)
    assert len({ours for ours, _ in outcomes}) >= 4


TAIL = [ToTensor(), Normalize(MEAN, STD)]


@pytest.mark.parametrize(
    ("transform", "word"),
    [
        (to_float, "set pillow"),
        (Compose([*TRAIN["timm"].transforms, transforms.RandomErasing()]), "set pillow"),
        (Compose([transforms.Pad(2), Resize(64), transforms.CenterCrop(64), *TAIL]), "begins with Pad"),
        (Compose([Resize((64, 64), InterpolationMode.NEAREST), *TAIL]), "(?i)nearest"),
    ],
    ids=["function", "erasing", "pad", "nearest"],
)
def test_what_cannot_be_read_that_way_is_refused(transform, word):
    with pytest.raises(ValueError, match=word):
        Pixels(transform, "torchvision")
    with pytest.raises(ValueError, match=r"decoder.*opencv"):
        ImageTextData("shards", 4, decoder="opencv")


class Seen(pl.LightningModule):
    """Notes the images of its batches, as they come from the loader and as a step gets them."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.steps, self.read, self.validated = [], [], []

    def _on_before_batch_transfer(self, batch, dataloader_idx=0):  # the public hook would be given floats
        self.read.append(batch["image"].dtype)
        return super()._on_before_batch_transfer(batch, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch | {"own hook": True}

    def training_step(self, batch, batch_idx):
        assert batch["own hook"]
        self.steps.append(batch["image"])
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch["image"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.fixture(scope="module")
def shards(corpus, tmp_path_factory):
    """Twelve larger images. Not to be changed."""

    def enlarge(sample):
        return sample | {"png": corpus.png(int(sample["txt"][7:]), (70, 70))}

    return str(corpus.write(tmp_path_factory.mktemp("large") / "shards", 12, change=enlarge))


def an_epoch(**settings):
    return trainer(max_steps=-1, max_epochs=1, **settings)


class ValidatesOnTraining(ImageLabelData):
    def val_dataloader(self):
        return self.train_dataloader()


class OwnHook(ImageLabelData):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch | {"own hook": True}


class AsPairs(Seen):
    """A module that makes pairs of its batches on their way to the device."""

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch["image"].to(device), batch["label"].to(device)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {"image": batch[0], "own hook": True}


@pytest.mark.filterwarnings("ignore")  # Lightning's, about workers and hooks in both
@pytest.mark.parametrize(
    ("kind", "module", "decoder", "precision"),
    [
        (ImageLabelData, Seen, "pillow", "32-true"),
        (ImageLabelData, Seen, "torchvision", "bf16-true"),
        (ValidatesOnTraining, Seen, "pillow", "32-true"),
        (OwnHook, Seen, "pillow", "32-true"),
        (ImageLabelData, AsPairs, "pillow", "32-true"),
    ],
)
def test_a_trainer_reads_uint8_and_every_step_gets_the_floats_of_a_loop_by_hand(
    shards, kind, module, decoder, precision
):
    def data():
        settings = {"num_workers": 0, "transform": TRAIN["open_clip"], "eval_transform": EVALUATION}
        return kind(shards, 4, shards, decoder=decoder, **settings)

    model, alone, dtype = module(), Seen(), torch.float32 if precision == "32-true" else torch.bfloat16
    an_epoch(precision=precision).fit(model, data())
    if (kind, module) == (ImageLabelData, Seen):
        assert model.read[:3] == [torch.uint8] * 3
    by_hand = [batch["image"] for batch in data().train_dataloader()]
    an_epoch().fit(alone, data().train_dataloader())  # without the data module
    an_epoch().validate(alone, data().train_dataloader(), verbose=False)
    assert all(images.dtype == torch.float32 for images in [*by_hand, *alone.steps, *alone.validated])
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(model.steps, by_hand, strict=True))
    assert by_hand[0].min() < 0  # normalised
    assert [(len(images), images.dtype) for images in model.validated] == [(4, dtype)] * 3


class Doubled(ToTensor):
    def __call__(self, image):
        return 2 * super().__call__(image)


def test_steps_of_a_users_own_kind_are_not_left_out(photo):
    data, crop = encode(photo, "JPEG"), [Resize((64, 64))]
    scalar = Compose([*crop, ToTensor(), Normalize(0.5, 0.25)])
    read = Pixels(scalar)
    assert torch.equal(read.normalize(read.read(data)[None])[0], scalar(decode_image(data)))
    assert not ends_with_normalize(Compose([*crop, Doubled(), Normalize(MEAN, STD)]))
    bounded = Compose([Resize(64, max_size=70), ToTensor(), Normalize(MEAN, STD)])
    assert Pixels(bounded, "torchvision").read(data).shape == bounded(decode_image(data)).shape

import json

import pytest
import torch

from diffvision.data.images.decode import MAX_IMAGE_BYTES, MAX_JSON_BYTES
from diffvision.data.images.image_data import to_float
from diffvision.data.images.samples import CaptionMember, ImageLabel, ImageMember, ImageText, Retrieval
from diffvision.data.shards.sample import BadSample


def test_the_first_of_the_image_keys_is_taken(corpus):
    def first_channel(keys):
        return int(ImageMember(to_float, keys)({"png": corpus.png(1), "jpg": corpus.png(256)})[0, 0, 0] * 255)

    assert first_channel(("jpg", "png")) == 1
    assert first_channel("png;jpg") == 0
    with pytest.raises(BadSample, match="missing image"):
        ImageMember(to_float, ("webp",))({"png": corpus.png(1)})


def test_members_too_large_are_bad_samples():
    with pytest.raises(BadSample, match="image too large"):
        ImageMember(to_float)({"png": bytes(MAX_IMAGE_BYTES + 1)})
    with pytest.raises(BadSample, match="JSON too large"):
        CaptionMember("json:caption").one({"json": bytes(MAX_JSON_BYTES + 1)})
    assert CaptionMember().one({"txt": ("é" * 5_000_000).encode()}) == "é" * 1000


def test_a_caption_from_a_list_is_drawn_with_torchs_generator():
    members = {"json": json.dumps({"captions": ["a", "b", " ", "c"]}).encode()}  # a blank one is never drawn
    caption = CaptionMember("json:captions")
    torch.manual_seed(0)
    drawn = [caption.one(members) for _ in range(30)]
    torch.manual_seed(0)
    assert [caption.one(members) for _ in range(30)] == drawn
    assert set(drawn) == {"a", "b", "c"}
    assert caption.all(members) == ["a", "b", "", "c"]


def test_batches_have_the_shapes_they_promise(corpus):
    image = ImageMember(to_float)
    members = {"png": corpus.png(5), "txt": b"sample 5\nsample 6", "cls": b"3"}
    pair = ImageText(image, CaptionMember(), lambda captions: torch.zeros(len(captions), 7, dtype=torch.int64))
    batch = pair.collate([pair.decode(members)] * 4)
    assert (batch["image"].shape, batch["image"].dtype) == ((4, 3, 2, 2), torch.float32)
    assert (batch["text"].shape, batch["text"].dtype) == ((4, 7), torch.int64)
    label = ImageLabel(image)
    assert label.collate([label.decode(members)] * 2)["label"].tolist() == [3, 3]
    retrieval = Retrieval(image, CaptionMember())
    assert retrieval.collate([retrieval.decode(members)])["captions"] == [["sample 5", "sample 6"]]


def test_a_label_beyond_the_classes_is_a_bad_sample(corpus):
    kind = ImageLabel(ImageMember(to_float), num_classes=4)
    assert kind.decode({"png": corpus.png(1), "cls": b"3"})["label"] == 3
    with pytest.raises(BadSample, match="label beyond the classes"):
        kind.decode({"png": corpus.png(1), "cls": b"4"})

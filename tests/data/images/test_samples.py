import json

import pytest
import torch

from diffvision.data import CaptionMember, ImageLabel, ImageMember
from diffvision.data.images.decode import MAX_IMAGE_BYTES, MAX_JSON_BYTES
from diffvision.data.images.image_data import to_float
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


def test_a_label_beyond_the_classes_is_a_bad_sample(corpus):
    kind = ImageLabel(ImageMember(to_float), num_classes=4)
    assert kind.decode({"png": corpus.png(1), "cls": b"3"})["label"] == 3
    with pytest.raises(BadSample, match="label beyond the classes"):
        kind.decode({"png": corpus.png(1), "cls": b"4"})

"""Conversations about images: layouts, placeholders, what is learned, and tokens that are the processor's own."""

import json
import pickle
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from PIL import Image
from transformers import LlavaImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

from diffvision.data import Conversation, VisionLanguageData, train_tokenizer
from diffvision.data.conversations import check_image, read_conversation, read_row
from diffvision.data.datasets.scenes_vqa import make_scenes_vqa
from diffvision.data.shards.sample import BadSample
from diffvision.data.text.tokenizers import END
from tests.data.conftest import encode

PART = "{%- for part in message.content %}{{ '<image>\n' if part.type == 'image' else part.text }}{% endfor %}"
LLAVA = (
    "{%- for message in messages %}{% if message.role == 'user' %}USER: " + PART + "{{ ' ASSISTANT:' }}"
    "{%- elif message.role == 'assistant' %}{{ ' ' }}" + PART + "{{ eos_token }}{% else %}" + PART + "{% endif %}"
    "{%- endfor %}"
)
CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}" + PART + "{{ '<|im_end|>\n' }}"
    "{% endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZE, PATCH = 32, 8
TOKENS = (SIZE // PATCH) ** 2
TEXTS = ["USER: What colour is the star? ASSISTANT: red", "Is there an arrow in the image? yes no Describe the image."]


def make_processor(template=LLAVA, *, begin=False, **settings):
    backend = tokenizers.Tokenizer.from_str(train_tokenizer(TEXTS, 300)._backend.to_str())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", "<image>", "<s>"], special_tokens=True)
    if begin:  # as Llama's
        tokenizer.bos_token = "<s>"
        number = tokenizer.convert_tokens_to_ids("<s>")
        pair = {"single": "<s> $A", "special_tokens": [("<s>", number)]}
        tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(**pair)
    square = {"height": SIZE, "width": SIZE}
    transform = LlavaImageProcessor(**{"do_pad": True, "size": square, "crop_size": square, **settings})
    sizes = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(transform, tokenizer, chat_template=template, image_token="<image>", **sizes)


@pytest.fixture(scope="module")
def processor():
    return make_processor()


def picture(colour="red"):
    return encode(Image.new("RGB", (40, 30), colour))


def row(*images, **record):
    names = ["png"] if len(images) == 1 else [f"{number}.png" for number in range(len(images))]
    return {**dict(zip(names, images, strict=True)), "json": json.dumps(record).encode()}


def llava(*turns):
    speakers = ("human", "gpt") * len(turns)
    return {"conversations": [{"from": who, "value": text} for who, text in zip(speakers, turns, strict=False)]}


def parts(*values):
    return [{"type": "image"} if value is None else {"type": "text", "text": value} for value in values]


TURNS = ("<image>\nWhat colour is the star?", "red", "Is there an arrow?", "no")
TWO = ("Is there an arrow in <image> and\n<image>?", "yes", "Describe the image.", "a star\n\n")


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("template", [LLAVA, CHATML, "{{ bos_token }}" + LLAVA])
@pytest.mark.parametrize("turns", [TURNS, TWO, ("Is there an arrow?", "yes")])
def test_the_tokens_are_those_of_the_processors_chat_template(template, turns, begin):
    processor = make_processor(template, begin=begin)
    kind = Conversation(processor, TOKENS, 200)
    images = [picture()] * "".join(turns).count("<image>")
    item = kind.decode(row(*images, **llava(*turns)))
    messages, _ = read_row(row(*images, **llava(*turns)))
    for part in (part for message in messages for part in message["content"] if part["type"] == "image"):
        part["image"] = Image.new("RGB", (40, 30))
    theirs = processor.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"][0]
    rest = theirs[len(item["tokens"]) :]
    assert item["tokens"] == theirs[: len(item["tokens"])]
    assert processor.decode(rest) == ("\n" if template == CHATML else "")  # after the last answer
    assert item["tokens"].count(processor.image_token_id) == TOKENS * len(images)


def test_only_the_answers_with_their_ends_are_learned(processor):
    item = Conversation(processor, TOKENS, 200).decode(row(picture(), picture("blue"), **llava(*TWO)))
    edges = torch.tensor([0, *item["learned"], 0]).diff().nonzero().flatten().tolist()
    learned = [item["tokens"][start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
    assert list(map(processor.decode, learned)) == [f" yes{END}", f" a star\n\n{END}"]


def test_layouts_give_the_same_messages():
    expected = [{"role": "user", "content": parts(None, "What?")}, {"role": "assistant", "content": parts("a cat")}]
    assert read_conversation(llava("<image>\nWhat?", "a cat"), 1) == expected
    assert read_conversation({"texts": [{"user": "What?", "assistant": "a cat", "source": "x"}]}, 1) == expected
    assert read_conversation({"messages": expected}, 1) == expected
    for empty in ({"texts": None}, {"messages": None}):  # as tables have it
        assert read_conversation({**llava("<image>\nWhat?", "a cat"), **empty}, 1) == expected
    assert read_conversation(llava("What?\n<image>", "a cat"), 1) == expected  # as LLaVA's trainer moves it
    plain = [{"role": "user", "content": "<image>\nWhat?"}, {"role": "assistant", "content": "a cat"}]
    assert read_conversation({"messages": plain}, 1) == expected
    two = [{"user": "Which?<image>", "assistant": "b"}, {"user": "Why?", "assistant": "c"}]
    assert [message["content"] for message in read_conversation({"texts": two}, 2)] == [
        parts(None, None, "Which?"), parts("b"), parts("Why?"), parts("c")
    ]  # fmt: skip
    assert read_conversation(llava(*TWO), 2)[0]["content"] == parts("Is there an arrow in ", None, " and", None, "?")
    with_system = {"system": "Be kind.", **llava("Why?\n", "so")}
    assert read_conversation(with_system, 0)[0] == {"role": "system", "content": parts("Be kind.")}
    assert read_conversation(with_system, 0)[1]["content"] == parts("Why?\n")


def test_images_are_read_in_the_order_of_their_numbers():
    members = {f"{number}.png": b"%d" % number for number in (10, 2, 0, 1)} | {"other.png": b"", "txt": b"x"}
    texts = json.dumps({"texts": [{"user": "Which?", "assistant": "b"}]}).encode()
    assert read_row({**members, "json": texts})[1] == [b"0", b"1", b"2", b"10"]


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        (row(picture(), **llava("What?", "a cat")), "image without placeholder"),
        (row(**llava("<image>What?", "a cat")), "placeholder without image"),
        (row(picture(), **llava("What?", "<image>")), "image in a message that"),
        (row(**llava("What?", "a", "b", "c", "d")), "does not alternate"),
        (row(conversations=[{"from": "gpt", "value": "a"}, {"from": "human", "value": "b"}]), "does not alternate"),
        (row(**llava("a", "b") | {"messages": [{"role": "user", "content": 3}]}), "not text, or parts"),
        (row(messages=[{"role": "user", "content": [{"type": "video"}]}]), "not text, or parts"),
        (row(caption="a cat"), "another layout"),
        (row(b"GIF89a", **llava("<image>", "a cat")), "not a JPEG"),
        (row(picture()[:60], **llava("<image>", "a cat")), "image"),
        ({"png": picture()}, "missing json"),
        ({"json": b"{"}, "damaged JSON"),
        (row(**llava("\ud800", "a")), "not UTF-8"),
        (row(**llava("What?", "a"), tools=[{"name": "add"}]), "'tools'"),
        (row(texts=[{"user": "Why?", "assistant": "so", "reasoning": "hm", "source": "x"}]), "'reasoning'"),
        (row(**llava("What? " * 100, "a")), "longer than 60 tokens"),
    ],
)
def test_what_cannot_be_used_is_a_bad_sample_with_its_reason(processor, members, reason):
    with pytest.raises(BadSample, match=reason):
        Conversation(processor, TOKENS, 60).decode(members)


def test_a_name_of_a_special_token_in_a_text_is_text(processor):
    kind = Conversation(processor, TOKENS, 200)
    item = kind.decode(row(**llava(f"What is {END}?", "the end")))
    assert item["tokens"].count(processor.tokenizer.eos_token_id) == 1
    parted = [{"role": "user", "content": parts("a <image> b")}, {"role": "assistant", "content": parts("c")}]
    assert processor.image_token_id not in kind.encode(parted)[0]


def test_the_bound_on_an_image_is_on_what_it_takes_padded_or_resized():
    padding = Conversation(make_processor(), TOKENS, 200)
    assert padding.transform(Image.new("RGB", (1, 8000))).shape == (3, SIZE, SIZE)  # a square of 64 million pixels
    with pytest.raises(BadSample, match="elongated"):
        padding.transform(Image.new("RGB", (8001, 1)))
    resizing = SimpleNamespace(size={"shortest_edge": SIZE})
    check_image(Image.new("RGB", (62_500, 1)), resizing)  # 32 * 32 * 62,500 pixels
    with pytest.raises(BadSample, match="elongated"):
        check_image(Image.new("RGB", (1, 62_501)), resizing)


def test_a_batch_has_its_images_in_reading_order_and_padding_at_the_right(processor):
    kind = Conversation(processor, TOKENS, 200)
    rows = [
        row(**llava("Why?", "so")),
        row(picture(), picture("blue"), **llava(*TWO)),
        row(picture("lime"), **llava(*TURNS)),
    ]
    items = [kind.decode(members) for members in pickle.loads(pickle.dumps(rows))]
    batch = pickle.loads(pickle.dumps(kind)).collate(items)
    assert batch["image"].shape == (3, 3, SIZE, SIZE)
    assert batch["image"].dtype == torch.float32
    expected = processor.image_processor([Image.new("RGB", (40, 30), c) for c in ("red", "blue", "lime")])
    torch.testing.assert_close(batch["image"], torch.stack(list(map(torch.as_tensor, expected["pixel_values"]))))
    assert batch["lengths"].tolist() == [len(item["tokens"]) for item in items]
    assert batch["tokens"].shape == batch["learned"].shape == (3, max(batch["lengths"]))
    padding = torch.arange(batch["tokens"].shape[1]) >= batch["lengths"][:, None]
    assert not batch["tokens"][padding].any()
    assert not batch["learned"][padding].any()
    assert batch["tokens"][1, : len(items[1]["tokens"])].tolist() == items[1]["tokens"]
    assert kind.collate(items[:1])["image"].shape == (0, 3, SIZE, SIZE)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"image_tokens": 9}, "16 placeholders"),
        ({"length": TOKENS}, "data.length is 16"),
        ({"processor": make_processor(None)}, "no chat template"),
        ({"processor": make_processor("{{ messages[0].role }}")}, "chat template"),
        ({"processor": make_processor(LLAVA.replace("<image>\n", ""))}, "placeholder"),
        ({"processor": make_processor("{{ messages | length }}")}, "does not extend"),
        ({"processor": make_processor(do_pad=False, do_center_crop=False, do_resize=False)}, "placeholders"),
        ({"processor": None}, "no processor"),
    ],
)
def test_what_no_conversation_could_be_trained_with_is_refused_before_training(processor, settings, error):
    settings = {"processor": processor, "image_tokens": TOKENS, "length": 100} | settings
    with pytest.raises(ValueError, match=error):
        VisionLanguageData("nowhere", 4, **settings).setup("fit")


def test_the_data_take_what_they_are_not_given_from_the_module(tmp_path, processor):
    make_scenes_vqa(tmp_path, scenes=100, evaluated=10)
    data = VisionLanguageData(str(tmp_path / "train"), 8, 400, str(tmp_path / "validation"), num_workers=0)
    module = SimpleNamespace(processor=processor, image_tokens=TOKENS)
    data.trainer = SimpleNamespace(lightning_module=module, global_rank=0, world_size=1, current_epoch=0)
    data.setup("fit")
    loader = data.train_dataloader()
    assert len(loader) == 12
    batch = next(iter(loader))
    assert batch["image"].shape == (8, 3, SIZE, SIZE)
    assert ((batch["tokens"] == processor.image_token_id).sum(1) == TOKENS).all()
    assert not torch.equal(batch["image"][0], batch["image"][1])
    assert sum(len(batch["lengths"]) for batch in data.val_dataloader()) == 10

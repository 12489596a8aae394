"""Answers: the same one by one and in a batch, and refused where they are of something else."""

import json

import pytest
import torch
from PIL import Image

from diffvision.evaluation.vision_language import answers as module
from diffvision.evaluation.vision_language.answers import answer_questions, generate_answers, read_answers
from diffvision.evaluation.vision_language.questions import read_sets

SHORT = {"max_new_tokens": 6, "batch_size": 4}


def images(*colours):
    return [Image.new("RGB", (32, 32), colour) for colour in colours]


ASKED = [
    ("Is there a star?", images("red")),
    ("Which?", images("blue", "green")),
    ("Describe the image, please, and at length.", images("white")),
    ("How many?", []),
]


def set_of(folder, task):
    return next(one for one in read_sets([str(folder)]) if one.task == task)


def greedy(vlm, text, pictures, count):
    """The likeliest tokens one by one, without cache and padding."""
    prompt = "USER: " + "<image>\n" * len(pictures) + f"{text} ASSISTANT:"
    inputs = vlm.processor(text=[prompt], images=pictures or None, return_tensors="pt")
    tokens, new = inputs["input_ids"], []
    for _ in range(count):
        out = vlm.module(input_ids=tokens, pixel_values=inputs.get("pixel_values")).logits[0, -1]
        new.append(int(out.argmax()))
        if new[-1] == vlm.module.generation_config.eos_token_id:
            break
        tokens = torch.cat([tokens, torch.tensor([[new[-1]]])], dim=1)
    return vlm.processor.tokenizer.decode(new, skip_special_tokens=True)


def test_answers_are_the_likeliest_tokens_whatever_is_in_the_batch(vlm):
    with torch.no_grad():
        alone = [greedy(vlm, text, pictures, 6) for text, pictures in ASKED]
    assert generate_answers(vlm.module, vlm.processor, ASKED, 6) == alone
    assert len({*alone}) > 1


def test_a_question_is_asked_with_the_prompt_and_all_its_images(vlm, questions, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "generate_answers", lambda *args: seen.extend(args[2]) or ["no"] * len(args[2]))
    answer_questions(vlm, set_of(questions, "vqa"), prompt="{question}\nIn one {word}.", batch_size=2)
    assert [text for text, _ in seen] == [f"{one}?\nIn one {{word}}." for one in ("How many", "Which", "Which")]
    assert [len(pictures) for _, pictures in seen] == [1, 1, 2]
    assert seen[2][1][1].getpixel((0, 0)) == (160, 95, 0)


def test_answers_are_written_and_only_read_for_their_questions_and_images(vlm, questions, tmp_path):
    file, asked = tmp_path / "answers.jsonl", set_of(questions, "vqa")
    answers = answer_questions(vlm, asked, **SHORT, file=file)
    assert read_answers(file, asked) == answers
    Image.new("RGB", (40, 32), "red").save(questions / "images" / "0.png")
    with pytest.raises(ValueError, match="answers"):
        read_answers(file, set_of(questions, "vqa"))


def test_answers_of_other_projects_are_read_by_question_in_any_order(questions, tmp_path):
    rows = [{"question_id": "c", "answer": "x"}, {"question_id": "a", "text": "3"}, {"question_id": "b", "text": ""}]
    (tmp_path / "vqa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = set_of(questions, "vqa")
    assert read_answers(tmp_path / "vqa.jsonl", asked) == read_answers(tmp_path, asked) == ["3", "", "x"]


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ('{"question_id": "a", "text": "3"}', "3 questions of vqa.json.*b is in one"),
        ("".join(f'{{"question_id": "{name}", "text": ""}}\n' for name in "abcd"), "4 answers"),
        ('{"question_id": "a"}', "line 1 of"),
        ('{"question_id": "a", "text": null}', "line 1 of"),
        ('{"question_id": "a", "text": "3"}\n{"question_id": "a", "text": "4"}', "line 2 of"),
        ("[]", "got 0 answers"),
    ],
)
def test_answers_that_do_not_fit_are_refused(questions, tmp_path, lines, named):
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=named):
        read_answers(tmp_path / "a.jsonl", set_of(questions, "vqa"))


def test_an_image_that_cannot_be_decoded_is_named_and_nothing_is_lost(vlm, questions, tmp_path):
    (questions / "images" / "2.png").write_bytes(b"no image")
    asked, file = set_of(questions, "pope"), tmp_path / "answers.jsonl"
    with pytest.raises(ValueError, match="not a JPEG, PNG or WebP"):
        answer_questions(vlm, asked, **SHORT, file=file)
    assert len(file.read_text().splitlines()) == 8


def test_images_go_before_a_question_wherever_its_placeholder_stands(vlm):
    texts = ["Which?", "<image>\nWhich?", "Which?\n<image>"]
    first, *others = [module.tokenize_questions(vlm.processor, [(text, images("red"))])["input_ids"] for text in texts]
    assert all(torch.equal(one, first) for one in others)

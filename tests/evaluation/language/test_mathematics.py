"""Mathematical questions: files, greedy answers judged by math-verify, and what is refused."""

import json

import pytest
import torch

from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.evaluation.language import mathematics as module
from diffvision.evaluation.language.generations import Generation
from diffvision.evaluation.language.mathematics import mathematics, read_questions
from diffvision.evaluation.language.options import LanguageOptions
from diffvision.models import language
from diffvision.opening import Model


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def opened():
    tokenizer = train_tokenizer(["Question: word q Answer: 1 2 3"], 280)
    model = language.create("diff-debug", vocab_size=tokenizer.vocab_size, max_length=64)
    return Model("debug", "language", model.eval(), tokenizer=tokenizer, max_length=64)


def test_answers_are_compared_by_value(opened, tmp_path, monkeypatch):
    rows = [
        {"question": "How many?", "answer": "3 + 4 = 7\n#### 7"},
        {"prompt": "Which share?", "answer": "3/4"},
        {"question": "How much?", "answer": "1,000"},
        {"question": "And now?", "answer": "#### 5"},
    ]
    written = ["2 + 5 is\n#### 7", r"so \boxed{0.75}", "the answer is 999", "no idea"]
    monkeypatch.setattr(
        module,
        "generate_rows",
        lambda model, prompts, **settings: [
            Generation(prompt.id, text, 3, 0, "length" if text == "no idea" else "end")
            for prompt, text in zip(prompts, written, strict=True)
        ],
    )
    results = mathematics(opened, read_questions([write(tmp_path / "a.jsonl", *rows)]), new_tokens=8)
    assert results["accuracy"].values.tolist() == [True, True, False, False]
    assert results["without_answer"].values.tolist() == [False, False, False, True]
    assert results["at_limit"].values.tolist() == [False, False, False, True]


def test_a_model_answers_and_resumes(opened, tmp_path):
    torch.manual_seed(0)
    questions = read_questions([write(tmp_path / "a.jsonl", *({"question": f"q {n}", "answer": n} for n in range(6)))])
    settings = {"new_tokens": 4, "folder": tmp_path / "out", "batch_size": 2}
    results = mathematics(opened, questions, **settings)
    assert results.keys() == {"accuracy", "without_answer", "at_limit"}
    lines = (tmp_path / "out" / "answers.jsonl").read_text()
    assert mathematics(opened, questions, **settings)["at_limit"].mean() == results["at_limit"].mean()
    assert (tmp_path / "out" / "answers.jsonl").read_text() == lines


def test_questions_are_drawn_by_the_seed(tmp_path):
    path = write(tmp_path / "a.jsonl", *({"question": f"q {n}", "answer": n} for n in range(9)))
    assert len(read_questions([path])) == 9
    assert read_questions([path], count=3, seed=1) == read_questions([path], count=3, seed=1)
    assert {one.id for one in read_questions([path], count=3)} < {f"{path}:{n}" for n in range(1, 10)}


@pytest.mark.parametrize("row", ['{"question": "q"}', '{"answer": "1"}', "[]", "x", '{"question": "q", "answer": " "}'])
def test_a_line_without_question_and_answer_is_named(row, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "q", "answer": "1"}\n' + row)
    with pytest.raises(ValueError, match="line 2"):
        read_questions([str(tmp_path / "a.jsonl")])


def test_what_has_no_room_or_no_question_is_refused(opened, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl"):
        read_questions([str(tmp_path / "empty.jsonl")])
    long = read_questions([write(tmp_path / "a.jsonl", {"question": "word " * 80, "answer": 1})])
    with pytest.raises(ValueError, match="lower new_tokens"):
        mathematics(opened, long, new_tokens=8)
    with pytest.raises(ValueError, match="template"):
        LanguageOptions(template="no place")

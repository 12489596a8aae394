"""Mathematical questions: files, greedy answers judged by math-verify, and what is refused."""

import json

import pytest
import torch

from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.evaluation.language import mathematics as module
from diffvision.evaluation.language.mathematics import mathematics, read_questions
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
    outputs = {row.get("question", row.get("prompt")): text for row, text in zip(rows, written, strict=True)}

    def answer(model, prompts, **settings):
        asked = map(model.tokenizer.decode, prompts)
        texts = [next(text for question, text in outputs.items() if question in one) for one in asked]
        return [model.tokenizer.encode(text) for text in texts]

    monkeypatch.setattr(module, "continue_greedily", answer)
    new_tokens = len(opened.tokenizer.encode("no idea"))
    results = mathematics(opened, read_questions([write(tmp_path / "a.jsonl", *rows)]), new_tokens=new_tokens)
    assert results["accuracy"].values.tolist() == [True, True, False, False]
    assert results["without_answer"].values.tolist() == [False, False, False, True]
    assert results["at_limit"].values.tolist() == [False, False, False, True]


def test_a_model_answers(opened, tmp_path):
    torch.manual_seed(0)
    rows = [{"question": "q" * (9 - n), "answer": n} for n in range(6)]
    file = tmp_path / "out" / "answers.jsonl"
    results = mathematics(
        opened, read_questions([write(tmp_path / "a.jsonl", *rows)]), new_tokens=4, file=file, batch_size=2
    )
    assert results.keys() == {"accuracy", "without_answer", "at_limit"}
    answers = [json.loads(line) for line in file.read_text().splitlines()]
    assert [one["id"] for one in answers] == [f"{tmp_path / 'a.jsonl'}:{n}" for n in range(1, 7)]
    assert [one["at_limit"] for one in answers] == results["at_limit"].values.tolist()


def test_questions_are_drawn_by_the_seed(tmp_path):
    path = write(tmp_path / "a.jsonl", *({"question": f"q {n}", "answer": n} for n in range(9)))
    first, again, other = (read_questions([path], count=3, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert {one.id for one in first} < {f"{path}:{n}" for n in range(1, 10)}


@pytest.mark.parametrize("row", ['{"question": "q"}', '{"answer": "1"}', "[]", "x", '{"question": "q", "answer": " "}'])
def test_a_line_without_question_and_answer_is_named(row, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "q", "answer": "1"}\n' + row)
    with pytest.raises(ValueError, match="line 2"):
        read_questions([str(tmp_path / "a.jsonl")])

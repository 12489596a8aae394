"""The math task: its numbers from answers written by hand, and the whole command on files."""

import json

import pytest
import torch

from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.evaluation.intervals import with_intervals
from diffvision.lab.command import run
from diffvision.lab.language.generations import Generation
from diffvision.lab.language.options import LabOptions
from diffvision.lab.mathematics import task
from diffvision.lab.mathematics.sets import Question, read_questions
from diffvision.lab.mathematics.task import Prompting, mathematics
from diffvision.models import language
from diffvision.opening import Model

PROBLEM = "Rimu has 14 pears. Lano has 9 pears. Taba has 3 more pears than Rimu. How many pears does Taba have?"
SOLUTION = "Taba: 14 + 3 = 17\n#### 17"
ANSWERED = [  # question, what is written, what ended it
    (Question("a", "gsm8k", "6 + 1?", "7", "7", 1), r" It is $\boxed{7.0}$", "end"),
    (Question("b", "gsm8k", "8 - 1?", "7", "7", 1), " I do not", "length"),
    (Question("c", "gsm8k", "1 + 1 + 1?", "3", "3", 2), " The answer is 4.", "end"),
    (Question("d", "math", "x", r"\frac{1}{2}", r"$\boxed{\frac{1}{2}}$"), " 0.5", "stop"),
    (Question("e", "arithmetic", PROBLEM, "17", SOLUTION, 1, 1), f" {SOLUTION}", "end"),
    (Question("f", "arithmetic", PROBLEM, "17", SOLUTION, 1, 1), " Taba: 9 + 3 = 12\n#### 12", "end"),
]


@pytest.fixture(scope="module")
def model():
    tokenizer = train_tokenizer(["Question: How many pears does Taba have?\nAnswer: 17"], 260)
    torch.manual_seed(0)
    module = language.create("diff-debug", vocab_size=tokenizer.vocab_size, max_length=192).eval()
    return Model("small", "language", module, tokenizer=tokenizer, max_length=192)


def test_the_numbers_of_answers_written_by_hand(model, monkeypatch, tmp_path):
    def written(model, prompts, **settings):
        assert settings["stops"] == ("Question:",)
        assert prompts[0].tokens[1:] == model.tokenizer.encode("Question: 6 + 1?\nAnswer:")
        return [Generation(q.id, text, len(text), prompt.cut, ended)
                for prompt, (q, text, ended) in zip(prompts, ANSWERED, strict=True)]  # fmt: skip

    monkeypatch.setattr(task, "generate_rows", written)
    monkeypatch.setattr(task, "has_math_verify", lambda: False)
    questions = [question for question, _, _ in ANSWERED]
    numbers = with_intervals(mathematics(model, questions, new_tokens=40, folder=tmp_path))
    expected = {
        "gsm8k/accuracy": 1 / 3,
        "gsm8k/without_answer": 1 / 3,
        "gsm8k/cut": 1 / 3,
        "gsm8k/prompts_cut": 0,
        "gsm8k/tokens": (20 + 9 + 17) / 3,
        "gsm8k/found_by/boxed": 1 / 3,
        "gsm8k/found_by/answer is": 1 / 3,
        "gsm8k/accuracy_by_steps/1": 1 / 2,
        "gsm8k/accuracy_by_steps/2": 0,
        "math/accuracy": 1,
        "math/found_by/last number": 1,
        "arithmetic/accuracy": 1 / 2,
        "arithmetic/accuracy_by_distractors/1": 1 / 2,
        "arithmetic/accuracy/1/1": 1 / 2,
        "arithmetic/distracted": 1 / 2,
        "arithmetic/malformed": 0,
        "accuracy": (1 / 3 + 1 + 1 / 2) / 3,
    }
    assert {key: numbers[key] for key in expected} == pytest.approx(expected)
    # Wilson's interval of 1 of 3, from the roots of a quadratic equation.
    assert (numbers["gsm8k/accuracy_low"], numbers["gsm8k/accuracy_high"]) == pytest.approx((0.0615, 0.7923), abs=1e-4)
    judged = [json.loads(line) for line in (tmp_path / "judged.jsonl").read_text().splitlines()]
    assert judged[0] == {"id": "a", "set": "gsm8k", "gold": "7", "answer": "7.0", "rule": "boxed", "accuracy": True}
    assert judged[1]["answer"] is None


def test_examples_come_first_with_their_solutions():
    example = ANSWERED[0][0]
    shown = Prompting(examples=[example._replace(text="2?", solution="two")])
    assert shown.prompt(example) == "Question: 2?\nAnswer: two\n\nQuestion: 6 + 1?\nAnswer:"
    assert Prompting("{question}\n", [example._replace(text="2?")]).prompt(example) == "2?\n7\n\n6 + 1?\n"
    assert Prompting("{question}\n").stops == ()
    with pytest.raises(ValueError, match="a is one of the examples, with"):
        Prompting(examples=[example]).prompt(example)
    with pytest.raises(ValueError, match=r"has no \{question\}"):
        Prompting("Q:")


def test_examples_make_room_for_a_question_and_a_question_has_to_fit(model):
    example = Question("e", "gsm8k", "2 + 2?" + " and" * 20, "4", "4")
    examples = [example._replace(text=f"{number} {example.text}") for number in range(3)]
    asked = [Question("short", "gsm8k", "3?", "3", "3")]
    [prompt] = task._prompts(model, Prompting(examples=examples), asked, new_tokens=40)
    assert prompt.cut == 2
    assert model.tokenizer.decode(prompt.tokens[1:]) == Prompting(examples=examples[2:]).prompt(asked[0])
    numbers = with_intervals(mathematics(model, asked, Prompting(examples=examples), new_tokens=40))
    assert numbers["gsm8k/prompts_cut"] == 1
    long = asked[0]._replace(id="x.jsonl:7", text="3?" * 200)
    message = r"x.jsonl:7 has a prompt of \d+ tokens, over the room of 152"
    with pytest.raises(ValueError, match=message):
        task._prompts(model, Prompting(), [long], new_tokens=40)


def test_a_draw_of_each_file_keeps_its_order(tmp_path):
    for name in ("a", "b"):
        rows = [{"question": f"{name}{number}", "answer": number} for number in range(9)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    drawn = [one.text for one in read_questions([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], count=3, seed=1)]
    assert len(drawn) == 6
    assert drawn == sorted(drawn)


def test_an_evaluation_resumes_with_the_answers_that_are_missing(model, tmp_path):
    questions = [question for question, _, _ in ANSWERED[:4]]
    first = with_intervals(mathematics(model, questions, new_tokens=4, folder=tmp_path))
    answers = tmp_path / "answers.jsonl"
    lines = answers.read_text().splitlines()
    assert len(lines) == 4
    # A line that was written whole, and one that was not.
    answers.write_text(f"{lines[0]}\n{lines[1][:9]}")
    assert with_intervals(mathematics(model, questions, new_tokens=4, folder=tmp_path)) == first
    assert sorted(answers.read_text().splitlines()) == sorted(lines)


def test_the_command_writes_its_files(model, tmp_path):
    language.save(model.module, tmp_path / "model", model.tokenizer)
    rows = [{"question": f"{number} + 1?", "answer": f"#### {number + 1}"} for number in range(3)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {"data": str(tmp_path / "data.jsonl"), "output": str(tmp_path / "out")}
    settings["options"] = LabOptions(new_tokens=4)
    results = run(str(tmp_path / "model"), tasks="math", **settings)
    assert results["model"]["math/gsm8k/tokens"] <= 4
    assert len((tmp_path / "out" / "math" / "model" / "answers.jsonl").read_text().splitlines()) == 3
    assert (tmp_path / "out" / "math.png").is_file()
    chat = LabOptions(new_tokens=4, chat="plain")
    plain = run(str(tmp_path / "model"), tasks="math", **settings | {"options": chat, "output": str(tmp_path / "chat")})
    assert plain["model"]["math/gsm8k/tokens"] <= 4
    with pytest.raises(ValueError, match="has no chat template"):
        run(str(tmp_path / "model"), tasks="math", **settings | {"options": LabOptions(chat="tokenizer")})
    with pytest.raises(ValueError, match="math reads questions with answers"):
        run(str(tmp_path / "model"), tasks="math,perplexity", **settings)
    with pytest.raises(ValueError, match="math needs questions with answers"):
        run(str(tmp_path / "model"), tasks="math")

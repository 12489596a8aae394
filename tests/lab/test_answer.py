"""`diffvision answer`: rows of a teacher's answers, which `data tokenize` takes."""

import json

import pytest
import torch

from diffvision.cli import main
from diffvision.data.text.chat import TEMPLATES
from diffvision.data.text.tokenizers import load_tokenizer, train_tokenizer
from diffvision.lab.answer import answer
from diffvision.lab.language import generations
from diffvision.models import language

ROWS = [
    {"prompt": "one"},
    {"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "left away"}]},
    {"prompt": "three", "response": "left away"},
    {"messages": [{"role": "system", "content": "briefly"}, {"role": "user", "content": "four"}]},
    {"prompt": "five " * 40},
    {"prompt": "six"},
]


@pytest.fixture
def teacher(tmp_path):
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["Question: one two three\nAnswer: It is four, five, six."], 280)
    module = language.create("diff-debug", vocab_size=tokenizer.vocab_size, max_length=96)
    language.save(module, tmp_path / "teacher", tokenizer)
    return str(tmp_path / "teacher")


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(map(json.dumps, ROWS)) + "\n")
    return file


@pytest.fixture
def written(teacher, monkeypatch):
    """What the teacher writes to each prompt; the prompts in the order in which it was asked."""
    tokenizer, asked = load_tokenizer(teacher), []
    texts = {"one": "1", "two": "2 2", "three": "x" * 200, "four": " ", "six": "6"}

    def continued(model, given, *, max_new_tokens, stops):
        prompts = [tokenizer.decode(tokens).rstrip().removesuffix("<think>") for tokens in given]
        names = [prompt.removesuffix("\nAnswer:").split()[-1] for prompt in prompts]
        asked.extend(names)
        return [tokenizer.encode(texts[name])[:max_new_tokens] for name in names]

    monkeypatch.setattr(generations, "continued", continued)
    return texts, asked


def test_whole_answers_become_rows_to_learn(teacher, prompts, written, tmp_path, capsys):
    output = tmp_path / "answers.jsonl"
    counts = answer(teacher, str(prompts), str(output), chat="question", new_tokens=20, batch_size=2)
    assert counts == {"written": 3, "not ended within new_tokens": 1, "empty": 1, "prompt too long": 1}
    assert "3 written, 1 not ended within new_tokens, 1 empty, 1 prompt too long" in capsys.readouterr().err
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["messages"][-2:] for row in rows] == [
        [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
        for question, text in (("one", "1"), ("two", "2 2"), ("six", "6"))
    ]
    assert [row["id"] for row in rows] == ["prompts-1", "prompts-3", "prompts-11"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl", "prompts.jsonl", "teacher"]
    assert main(["data", "tokenize", str(output), str(tmp_path / "shards"), teacher, "--chat", "question"]) == 0
    with pytest.raises(FileExistsError, match=r"answers\.jsonl exists: give another"):
        answer(teacher, str(prompts), str(output), chat="question")


def test_tools_of_a_row_are_written_and_kept(teacher, written, tmp_path):
    row = {"prompt": "one", "tools": [{"name": "add"}], "id": 4}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row))
    settings = {"new_tokens": 20, "batch_size": 1}
    with pytest.raises(ValueError, match="'tools'"):
        answer(teacher, str(tmp_path / "prompts.jsonl"), str(tmp_path / "a.jsonl"), chat="question", **settings)
    (tmp_path / "tools.jinja").write_text("{% for tool in tools %}{{ tool.name }}{% endfor %} " + TEMPLATES["question"])
    answer(
        teacher,
        str(tmp_path / "prompts.jsonl"),
        str(tmp_path / "a.jsonl"),
        chat=str(tmp_path / "tools.jinja"),
        **settings,
    )
    assert json.loads((tmp_path / "a.jsonl").read_text())["tools"] == row["tools"]


def test_a_command_that_was_ended_asks_only_for_the_rest(teacher, prompts, written, tmp_path):
    texts, asked = written
    settings = {"chat": "question", "new_tokens": 20, "batch_size": 1}
    del texts["six"]
    with pytest.raises(KeyError):
        answer(teacher, str(prompts), str(tmp_path / "a.jsonl"), **settings)
    before = list(asked)
    texts["six"] = "6"
    assert answer(teacher, str(prompts), str(tmp_path / "a.jsonl"), **settings)["written"] == 3
    assert len(before) > 1
    assert asked[len(before)] == before[-1] == "six"
    assert len(asked) == 5 + 1  # each once, and the one that failed again


def test_an_answer_ends_where_the_template_ends_it_and_begins_where_it_begins(teacher, written, tmp_path):
    texts, _ = written
    texts |= {"one": "thought</think>1<end>\nmore", "two": "2"}
    template = tmp_path / "thinking.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<end>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\\nAnswer:<think>\\n' }}{% endif %}"
    )
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    output = tmp_path / "a.jsonl"
    answer(teacher, str(tmp_path / "prompts.jsonl"), str(output), chat=str(template), new_tokens=60)
    rows = [json.loads(line)["messages"][-1]["content"] for line in output.read_text().splitlines()]
    assert rows == ["<think>\nthought</think>1", "<think>\n2"]


def test_a_template_that_wants_a_system_s_message_writes_the_rows_that_have_one(teacher, written, tmp_path):
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}{{ m.content }} {% endfor %}"
    )
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "a.jsonl"
    rows = [{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]}]
    prompts.write_text(json.dumps(rows[0]) + "\n")
    assert answer(teacher, str(prompts), str(output), chat=str(template), new_tokens=20)["written"] == 1
    prompts.write_text('{"prompt": "one"}\n')
    with pytest.raises(ValueError, match=r"row prompts-1 of .*refuses the row"):
        answer(teacher, str(prompts), str(tmp_path / "b.jsonl"), chat=str(template), new_tokens=20)


def test_a_real_model_answers(teacher, tmp_path):
    """An untrained one ends nothing: what its greedy text is, is said by the error alone."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n')
    with pytest.raises(ValueError, match="none of 1 answers ended within 4"):
        answer(teacher, str(file), str(tmp_path / "a.jsonl"), chat="question", new_tokens=4)
    assert json.loads((tmp_path / "a.jsonl.partial").read_text())["stopped_by"] == "length"


@pytest.mark.parametrize(
    ("line", "settings", "message"),
    [
        ("{", {}, "line 1 of .* is not JSON"),
        ('{"text": "a"}', {}, "row 1 of .*: a row of another layout: it needs"),
        ('{"prompt": ["a"]}', {}, "row 1 of .*: a message whose role or content is not text"),
        ('{"prompt": "a", "response": null}', {}, "row 1 of .*: a message whose role or content is not text"),
        ('{"messages": []}', {}, "row 1 of .* has no question before its answer"),
        ("", {}, "no rows in .*: give a file of rows"),
        ('{"prompt": "a"}', {"chat": "tokenizer"}, "has no chat template"),
        ('{"prompt": "a"}', {"new_tokens": 0}, "new_tokens is 0: it must be at least 1"),
        ('{"prompt": "a"}', {"batch_size": -1}, "batch_size is -1: it must be at least 1"),
        ('{"prompt": "' + "a " * 99 + '"}', {"new_tokens": 20}, "all prompts are longer than the 76 tokens that"),
        ('{"prompt": "\\ud800"}', {"new_tokens": 20}, "row prompts-1 of .*: text not UTF-8"),
        ('{"prompt": "a"}', {"new_tokens": 96}, "new_tokens is 96, and .* reads 96 tokens in all"),
    ],
)
def test_bad_input_is_one_error(teacher, tmp_path, line, settings, message):
    (tmp_path / "prompts.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        answer(teacher, str(tmp_path / "prompts.jsonl"), str(tmp_path / "a.jsonl"), **{"chat": "question"} | settings)

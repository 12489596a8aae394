"""Rows of the three layouts, in miniatures of their files, and prompts that fit what a model reads."""

import json

import pytest

from diffvision.lab.faithfulness.prompts import fit_prompt, read_templates
from diffvision.lab.faithfulness.rows import Row, read_rows

OURS = {"id": "q1", "task": "qa", "document": "Anna is in Oslo.", "question": "Where is Anna?", "answers": ["Oslo"]}
SUMMARY = {"id": 7, "task": "summary", "document": "It rained.", "reference": "Rain."}
LOOKBACK = {"document": "A long article.", "summary": "Short."}
QUESTION = {
    "question": "who won",
    "answers": ["Ann"],
    "ctxs": [
        {"id": "1", "title": "t", "text": "no 1", "hasanswer": False, "isgold": False},
        {"id": "2", "title": "t", "text": "Ann won", "hasanswer": True, "isgold": True},
        {"id": "3", "title": "t", "text": "no 2", "hasanswer": False, "isgold": False},
    ],
}
LONG_BENCH = {"input": "Who?", "context": "Passage 1: Ann.", "answers": ["Ann", "Anna"], "length": 3}
LONG_BENCH |= {"dataset": "hotpotqa", "language": "en", "all_classes": None, "_id": "5a"}
NEWS = LONG_BENCH | {"input": "", "dataset": "multi_news", "_id": "9", "answers": ["They met."]}


def behind_start(words):
    return lambda text: [0, *words.encode(text)]


def written(path, *records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def test_layouts_are_recognised_by_their_fields(tmp_path):
    records = (OURS, SUMMARY, LOOKBACK, QUESTION, LONG_BENCH, NEWS)
    assert read_rows([written(tmp_path / "mixed.jsonl", *records)]) == [
        Row("q1", "qa", "Anna is in Oslo.", "Where is Anna?", ("Oslo",)),
        Row("7", "summary", "It rained.", reference="Rain."),
        Row("mixed-3", "summary", "A long article.", reference="Short."),
        Row("mixed-4", "qa", "no 1\nAnn won\nno 2", "Who won?", ("Ann",)),
        Row("5a", "qa", "Passage 1: Ann.", "Who?", ("Ann", "Anna"), dataset="hotpotqa", cut="middle"),
        Row("9", "summary", "Passage 1: Ann.", reference="They met.", dataset="multi_news", cut="middle"),
    ]


def test_rows_are_drawn_by_the_seed(tmp_path):
    file = written(tmp_path / "a.jsonl", *({**SUMMARY, "id": number} for number in range(30)))
    drawn = read_rows([file], count=5, seed=1)
    assert drawn == read_rows([file], count=5, seed=1)
    assert drawn != read_rows([file], count=5, seed=2)
    numbers = [int(row.id) for row in drawn]
    assert numbers == sorted(set(numbers))
    assert len(read_rows([file], count=31)) == 30


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, r"row 2 of .*a\.jsonl has the fields text: write \{document, task, \.\.\.\}, or \{answers, "),
        ([1], r"row 2 of .* has the fields of no object"),
        (OURS | {"id": "x", "task": "poem"}, "row 2 of .*: task is 'poem': write summary or qa"),
        (OURS | {"id": "x", "question": None}, "row 2 of .*: question is None: write a text"),
        (OURS | {"id": "x", "question": " "}, "row 2 of .*: question is empty: write one"),
        (QUESTION | {"ctxs": ["a"]}, "row 2 of .*: ctxs has 'a': write passages with text and hasanswer"),
        (QUESTION | {"ctxs": [{"text": "a"}]}, "row 2 of .*: ctxs has .*: write passages with text and hasanswer"),
        (OURS | {"id": "x", "answers": "Oslo"}, "row 2 of .*: answers is 'Oslo': write a list"),
        (OURS | {"id": "x", "document": " "}, "row 2 of .* has an empty document: leave the row out"),
        (OURS | {"id": "x", "document": "\ud800"}, "row 2 of .*: text not UTF-8"),
        (OURS, "two rows of the data have the id 'q1'"),
        (QUESTION | {"ctxs": QUESTION["ctxs"][:2]}, "row 2 of .*: ctxs has 1 passages with the answer and 1 without"),
    ],
)
def test_bad_lines_are_named(record, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_rows([written(tmp_path / "a.jsonl", OURS, record)])


def test_files_without_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no rows in"):
        read_rows([written(tmp_path / "none.jsonl")])
    (tmp_path / "cut.jsonl").write_text('{"document": "a')
    with pytest.raises(ValueError, match=r"line 1 of .*cut\.jsonl is not JSON"):
        read_rows([tmp_path / "cut.jsonl"])
    with pytest.raises(ValueError, match="is a folder: give files in it"):
        read_rows([tmp_path])


def test_a_prompt_without_the_question_is_refused(words):
    row = Row("r", "qa", "Ann has 5.", "How many?")
    with pytest.raises(ValueError, match="row 'r' has a question, and"):
        fit_prompt(row, words, None, behind_start(words), {"qa": "{context}"})


def test_prompts_are_whole_or_lose_the_end_or_the_middle_of_the_document(words):
    document = " ".join(f"w{number}" for number in range(60))
    row = Row("r", "summary", document)
    whole = fit_prompt(row, words, None, behind_start(words), {})
    assert whole.tokens[0] == 0
    assert whole.cut == 0
    text = words.decode(whole.tokens[1:])
    assert text.startswith("Generate a summary based on the information in the document.")
    assert text.endswith(f"#Document#: {document}\n#Summary#:")
    room = len(whole.tokens) - 21
    for cut, left in (("end", "w0 w1"), ("middle", "w58 w59")):
        short = fit_prompt(Row("r", "summary", document, cut=cut), words, room, behind_start(words), {})
        kept = words.decode(short.tokens)
        assert len(short.tokens) <= room
        assert 21 <= short.cut <= 23
        assert left in kept
        assert "#Summary#:" in kept
        assert ("w59" in kept) == (cut == "middle")
        assert "w30 w31" in kept if cut == "end" else "w0 w1" in kept
    with pytest.raises(ValueError, match=r"row 'r' has a prompt of \d+ tokens"):
        fit_prompt(row, words, 12, behind_start(words), {})


def test_templates_of_a_file_are_filled_once(words, tmp_path):
    file = tmp_path / "dataset2prompt.json"
    file.write_text(json.dumps({"hotpotqa": "Read: {context} Q: {input} A:", "qa": "{context} {input}"}))
    row = Row("r", "qa", "has {input} in it", "Who?", dataset="hotpotqa")
    templates = read_templates(file, [row])
    assert (
        words.decode(fit_prompt(row, words, None, words.encode, templates).tokens)
        == "Read: has {input} in it Q: Who? A:"
    )
    assert (
        words.decode(fit_prompt(Row("r", "qa", "d", "Who?"), words, None, words.encode, templates).tokens) == "d Who?"
    )
    file.write_text('{"qa": "no document"}')
    with pytest.raises(ValueError, match=r"prompts is .*: write .*\{context\}"):
        read_templates(file, [row])
    file.write_text('{"summry": "{context}"}')
    with pytest.raises(ValueError, match="with summry, and the rows are"):
        read_templates(file, [row])

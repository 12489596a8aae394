"""Miniatures of published sets in their layouts, with rows written for these tests."""

import gzip
import json

import pytest

from diffvision.lab.mathematics.sets import LAYOUTS, read_questions

ROWS = {
    "gsm8k": (
        {"question": "Ann has 3 pens and buys 4.", "answer": "She has 3+4=<<3+4=7>>7.\nAll: <<7*1=7>>7\n#### 7"},
        ("Ann has 3 pens and buys 4.", "7", "She has 3+4=7.\nAll: 7\n#### 7", 2),
    ),
    "math": (
        {"problem": "What is $1/2$?", "level": "Level 1", "solution": r"It is $\boxed{\frac{1}{2}}$."},
        ("What is $1/2$?", r"\frac{1}{2}", r"It is $\boxed{\frac{1}{2}}$.", None),
    ),
    "svamp": (
        {"ID": "chal-1", "Body": "Tom has 8 eggs", "Question": "How many?", "Equation": "( 8.0 / 2.0 )", "Answer": 4.0},
        ("Tom has 8 eggs. How many?", "4", "4", 1),
    ),
    "asdiv": (
        {"body": "A bee has 6 legs.", "question": "Two bees?", "answer": "12 (legs)", "formula": "6+6=12", "idx": 0},
        ("A bee has 6 legs. Two bees?", "12", "12", 1),
    ),
    "mawps": (
        {"input": "70 shells, 27 left. How many went ?", "target": 43.0, "type": "singleeq", "idx": 0},
        ("70 shells, 27 left. How many went ?", "43", "43", None),
    ),
    "carp": (
        {"content": "$( a ) ^ { 2 }$ equals ____?", "answer": "a ^ { 2 }", "steps": "It is $a ^ { 2 }$.", "exprs": []},
        ("$( a ) ^ { 2 }$ equals ____?", "a ^ { 2 }", "It is $a ^ { 2 }$.", None),
    ),
    "tabmwp": (
        {
            "question": "How many coins?",
            "choices": ["3", "4"],
            "answer": "4",
            "table_title": "Coins",
            "table": "Name | Coins\nAnn | 4",
            "solution": "Ann has 4.",
            "ques_type": "multi_choice",
        },
        (
            'Read the following table regarding "Coins" and answer a question:\nName | Coins\nAnn | 4\nHow many coins? '
            "Please select from the following options: ['3', '4']",
            "4",
            "Ann has 4.",
            None,
        ),
    ),
    "college_math": (
        {"data_source": "college_math.A", "question_number": "exercise.1", "question": "Solve.", "answer": "$x=5$"},
        ("Solve.", "$x=5$", "$x=5$", None),
    ),
    "arithmetic": (
        {"prompt": "Ta has 2 nuts.", "response": "Bo: 2 + 1 = 3\n#### 3", "answer": "3", "steps": 1, "distractors": 0},
        ("Ta has 2 nuts.", "3", "Bo: 2 + 1 = 3\n#### 3", 1),
    ),
    "questions": ({"id": 1, "question": "1+1?", "answer": 2}, ("1+1?", "2", "2", None)),
    "responses": ({"prompt": "1+1?", "response": "2\n#### 2"}, ("1+1?", "2", "2\n#### 2", None)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_row_of_each_layout(name, tmp_path):
    row, (text, answer, solution, steps) = ROWS[name]
    file = tmp_path / "test.jsonl"
    file.write_text(f"{json.dumps(row)}\n\n{json.dumps(row)}\n")
    first, second = read_questions([file])
    assert first[1:6] == (name, text, answer, solution, steps)
    assert first[1:] == second[1:]
    assert (first.id, second.id) == (f"{file}:1", f"{file}:3")


def test_a_list_and_an_object_of_rows(tmp_path):
    (tmp_path / "list.json").write_text(json.dumps([ROWS["svamp"][0]]))
    (tmp_path / "object.json").write_text(json.dumps({"16": ROWS["tabmwp"][0]}))
    questions = read_questions([tmp_path / "list.json", tmp_path / "object.json"])
    assert [(one.set, one.id.rpartition(":")[2]) for one in questions] == [("svamp", "1"), ("tabmwp", "16")]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "a", "answer": "#### 1"}, {"question": "b", "answer": "2"}],
         r"x.jsonl:2 has an answer that cannot be read, '2': gsm8k ends with #### NUMBER; correct the row"),
        ([{"problem": "a", "solution": r"\boxed{\frac{1}{2}"}],
         r"x.jsonl:1 has an answer .* math ends with \\boxed{ANSWER}"),
        ([{"input": "a", "target": "many"}], "x.jsonl:1 has an answer .*'many': mawps ends with a number"),
        ([{"question": "a", "answer": " "}], "x.jsonl:1 has an answer .* an answer that is not empty"),
        ([{"question": "a", "answer": "1"}, {"question": "b"}],
         "x.jsonl:2 lacks answer"),
        ([{"text": "a"}], "x.jsonl:1 has the keys text"),
        ([{"problem": "a", "solution": 3}], "x.jsonl:1 has values of other types"),
        ([{"question": ["a"], "answer": "1"}], r"x.jsonl:1 has \['a'\] for its question"),
        ([{"question": "a", "answer": ["1"]}], r"x.jsonl:1 has \['1'\] for its answer"),
        ([{"content": "a", "answer": "1", "steps": ["b"]}], r"x.jsonl:1 has \['b'\] for its solution"),
        ([3], "x.jsonl:1 is 3, no object"),
        ([], "x.jsonl has no rows"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(rows, message, tmp_path):
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=message):
        read_questions([tmp_path / "x.jsonl"])


def test_a_byte_order_mark_and_line_ends_of_windows(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"question": "a", "answer": "1"}\r\n')
    assert [(one.text, one.answer) for one in read_questions([tmp_path / "x.jsonl"])] == [("a", "1")]


def test_a_file_that_is_given_twice(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"question": "a", "answer": "1"}\n')
    with pytest.raises(ValueError, match=r"x.jsonl is given twice, also"):
        read_questions([tmp_path / "x.jsonl", tmp_path / "." / "x.jsonl"])


def test_what_is_no_json(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"question": "a", "answer": "1"}\n{"question"')
    with pytest.raises(ValueError, match=r"line 2 of .*x.jsonl is not JSON"):
        read_questions([tmp_path / "x.jsonl"])


def test_a_folder_of_files_of_one_question_each(tmp_path):
    for number, name in enumerate(("algebra", "geometry")):
        (tmp_path / name).mkdir()
        row = {"problem": name, "level": "1", "solution": rf"\boxed{{{number}}}"}
        (tmp_path / name / "1.json").write_text(json.dumps(row))
    read = read_questions([tmp_path])
    assert [(one.set, one.text, one.answer) for one in read] == [("math", "algebra", "0"), ("math", "geometry", "1")]
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"none has no \.jsonl, \.json"):
        read_questions([tmp_path / "none"])


def test_a_worded_problem_needs_its_steps(tmp_path):
    row = {"prompt": "p", "response": "I think 3.\n#### 3", "answer": 3, "steps": 1, "distractors": 0}
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=r"x.jsonl:1: the solution .* is not"):
        read_questions([tmp_path / "x.jsonl"])


def test_a_file_in_two_forms_and_a_link_to_one(tmp_path):
    row = b'{"question": "a", "answer": "1"}\n'
    (tmp_path / "x.jsonl").write_bytes(row)
    (tmp_path / "about.json").write_text('{"source": "made"}')
    assert len(read_questions([tmp_path])) == 1
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(row))
    with pytest.raises(ValueError, match=r"x.jsonl.gz is given twice, also"):
        read_questions([tmp_path])
    (tmp_path / "x.jsonl.gz").unlink()
    (tmp_path / "y.jsonl").symlink_to(tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match=r"y.jsonl is given twice, also"):
        read_questions([tmp_path])


def test_numbers_are_digits_and_finite(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"input": "a", "target": 0.00001}\n{"input": "b", "target": 1e16}\n')
    assert [one.answer for one in read_questions([file])] == ["0.00001", "10000000000000000"]
    file.write_text('{"question": "a", "answer": NaN}\n')
    with pytest.raises(ValueError, match=r"x.jsonl:1 has an answer that cannot"):
        read_questions([file])


def test_one_row_of_gsm8k_among_others(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"question": "a", "answer": "7"}\n{"question": "b", "answer": "3+4\\n#### 7"}\n')
    assert [one.answer for one in read_questions([file])] == ["7", "7"]
    file.write_text('{"question": "a \\ud83d", "answer": "7"}\n')
    with pytest.raises(ValueError, match=r"x.jsonl:1: text not UTF-8"):
        read_questions([file])

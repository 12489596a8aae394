"""Judges of strings by hand, and verdicts in replies as judges write them."""

import pytest

from diffvision.lab.faithfulness.rows import Row
from diffvision.lab.faithfulness.rules import contains, grounded, normalised
from diffvision.lab.faithfulness.verdicts import prompt_of, read_prompt, spans_of, verdict_of

ROW = Row(
    "r",
    "qa",
    "The Oslo bridge (1,997-1,999, 3.5 m) of Ole Bull opened in B12.",
    "Who built it?",
    ("Ole Bull", "The Bull"),
)


@pytest.mark.parametrize(
    ("output", "accurate"),
    [("It was ole bull!", True), ("a bull", True), ("Ole, Bull", True), ("Ole", False), ("Nobody", False)],
)
def test_contains_looks_for_an_answer_as_squad_normalises_it(output, accurate):
    assert contains(ROW, output).accurate is accurate


@pytest.mark.parametrize(
    ("output", "accurate", "spans"),
    [
        ("Opened in 1999 by Ole Bull.", True, ()),
        ("Somebody opened it. Then it closed.", None, ()),
        ("It is the bridge of Anna Berg, of 1998.", False, ("1998", "Anna Berg")),
        ("In Oslo, not in Bergen.", False, ("Bergen",)),
        ("Mister Bull's bridge", True, ()),
        ("99 bridges", False, ("99",)),  # a part of 1999
        ("In 1997, 3.5 m. At B12", True, ()),
        ("It is 3.6 m, in the 5th year", False, ("3.6",)),
        ("so the iBridge, at 2PM, in 3D, I think", None, ()),  # capitals inside of words, and a pronoun
        ("by Östen Élan", False, ("Östen Élan",)),
    ],
)
def test_grounded_finds_invented_numbers_and_names(output, accurate, spans):
    judgement = grounded(ROW, output)
    assert (judgement.accurate, judgement.spans) == (accurate, spans)


def test_a_comma_between_thousands_is_no_comma_between_numbers():
    row = Row("r", "summary", "As in [1,2], of 1,999,000 people")
    assert grounded(row, "it says 1, 2 and 1999000").accurate is True
    assert grounded(row, "it says 12").spans == ("12",)


def test_normalised():
    assert normalised("The  cat's, a Theatre") == "cats theatre"
    assert len({normalised(text) for text in ("C", "C++", "C#", "लड़का", "लड़की")}) == 5
    assert normalised("cafe\u0301") == normalised("Caf\u00e9.")


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("It says so. **Conclusion: True**", True),
        ('**Conclusion: False**\n**Problematic Spans: ["x"]**', False),
        ("**Conclusion**: **false**.", False),
        ('"Conclusion": "True"', True),
        ("conclusion: TRUE, for all of it follows", True),
        ("**Conclusion: True** or **Conclusion: False**", None),
        ("**Conclusion: True/False**", None),
        ("**Conclusion: Not true**", None),
        ("**Conclusion:** it cannot be decided", None),
        ("**Conclusion: It isn't true**", None),
        ("**Conclusion: It isn’t true**", None),
        ("Conclusion: partially true", None),
        ("Conclusion: 'True'", True),
        ("Conclusion：False", False),
        ("All of it is true.", None),
        ("In conclusion, it is true", None),
        ("", None),
        ("<html><body>502 Bad Gateway</body></html>", None),
        ("Conclusion: False\n\nConclusion: False", False),
    ],
)
def test_a_verdict_is_one_of_two_words_behind_its_mark(reply, verdict):
    assert verdict_of(reply) is verdict


@pytest.mark.parametrize(
    ("reply", "spans"),
    [
        ('**Problematic Spans: ["a \\"quoted\\" word", "b"]**', ['a "quoted" word', "b"]),
        ("**Problematic Spans: ['it's']**", []),
        ("**Problematic Spans: ['a', \"it's\"]**", ["a", "it's"]),
        ("**Problematic Spans: [__import__('os').abort()]**", []),
        ("Problematic Spans: []", []),
        ("none", []),
    ],
)
def test_spans_are_read_and_never_run(reply, spans):
    assert spans_of(reply) == spans


def test_a_judge_reads_five_parts(tmp_path):
    prompt = prompt_of(ROW, "It was {document}.")
    parts = [
        "#Document#: The Oslo",
        "#Question#: Who",
        '["Ole Bull", "The Bull"]',
        "#Proposed Answer#: It was {document}.",
    ]
    positions = [prompt.index(part) for part in [*parts, "**Conclusion: True**"]]
    assert positions == sorted(positions)
    assert "#Ground Truth Summary#: none is given" in prompt_of(Row("s", "summary", "d"), "o")
    file = tmp_path / "prompt.txt"
    file.write_text("{document} | {output} | {unknown}")
    assert prompt_of(ROW, "so {truth}", read_prompt(file)) == f"{ROW.document} | so {{truth}} | {{unknown}}"
    file.write_text("{document}")
    with pytest.raises(ValueError, match=r"judge\.prompt is .*, which has no"):
        read_prompt(file)

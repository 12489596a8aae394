"""Worded problems: read back as sentences and computed anew, and splits that share nothing that they must not."""

import json
import random
import re
from fractions import Fraction

import pytest

from diffvision.cli import main
from diffvision.data.datasets.arithmetic import make_arithmetic
from diffvision.data.datasets.arithmetic_text import all_names, compose

SENTENCE = re.compile(
    r"(?P<name>\w+) has (?:(?P<number>\d+) )?(?:(?P<how>more|fewer|times as many) )?(?:as many )?(?P<thing>[a-z]+)"
    r"(?: (?:than|as) (?P<other>\w+)(?: and (?P<another>\w+) together)?)?\."
)
QUESTION = re.compile(r"How many (?P<thing>\w+) does (?P<name>\w+) have\?")


def computed(prompt):
    """The answer, and the people whose numbers lead to it, by the text alone."""
    said = {(found["name"], found["thing"]): found for found in SENTENCE.finditer(prompt)}
    assert "".join(prompt.split()) == "".join(
        "".join(found[0].split()) for found in [*SENTENCE.finditer(prompt), QUESTION.search(prompt)]
    )

    def value(name, thing):
        found = said[name, thing]
        people.append(name)
        number = int(found["number"] or 0)
        if found["other"] is None:
            return number
        if found["another"] is not None:
            return value(found["other"], thing) + value(found["another"], thing)
        other = value(found["other"], thing)
        return {"more": other + number, "fewer": other - number, "times as many": other * number}[found["how"]]

    people = []
    asked = QUESTION.search(prompt)
    return value(asked["name"], asked["thing"]), set(people), len(said)


def rows(folder, split):
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arithmetic")
    make_arithmetic(folder, documents=400, steps=3, distractors=4, highest=99, evaluated=5, seed=1)
    return folder


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_solutions_are_what_the_sentences_say(split, folder):
    for row in rows(folder, split):
        answer, people, sentences = computed(row["prompt"])
        *lines, last = row["response"].split("\n")
        assert last == f"#### {answer}" == f"#### {row['answer']}"
        assert len(lines) == row["steps"]
        for line in lines:
            name, first, sign, second, result = re.fullmatch(r"(\w+): (\d+) (.) (\d+) = (\d+)", line).groups()
            first, second = Fraction(first), Fraction(second)
            assert {"+": first + second, "-": first - second, "x": first * second}[sign] == int(result)
            assert 1 <= int(result) <= 99
            assert name in people
        # What is said besides the quantities that lead to the answer distracts.
        assert sentences - row["distractors"] == len(people)


def test_the_splits_share_no_problem_and_the_test_no_name(folder):
    splits = {split: rows(folder, split) for split in ("train", "validation", "test")}
    prompts = [row["prompt"] for one in splits.values() for row in one]
    assert len(set(prompts)) == len(prompts)
    assert len({row["id"] for one in splits.values() for row in one}) == len(prompts)
    assert not set(all_names()[0]) & set(all_names()[1])
    for split, names in (("train", all_names()[0]), ("test", all_names()[1])):
        assert {found["name"] for row in splits[split] for found in SENTENCE.finditer(row["prompt"])} <= set(names)
    cells = {split: {(row["steps"], row["distractors"]) for row in one} for split, one in splits.items()}
    assert cells["train"] == {(k, d) for k in (1, 2, 3) for d in range(5)}
    assert cells["test"] == {(k, d) for k in range(1, 7) for d in (0, 2, 4, 8, 16)}
    assert [len(one) for one in splits.values()] == [400, 50, 150]


def test_a_seed_decides_all(tmp_path, capsys):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        arguments = [str(tmp_path / name), "--documents", "5", "--evaluated", "1", "--seed", str(seed)]
        assert main(["data", "make", "arithmetic", *arguments]) == 0
    assert "5 problems in train, 10 problems in validation, 40 problems in test" in capsys.readouterr().out
    for split in ("train", "validation", "test"):
        assert rows(tmp_path / "a", split) == rows(tmp_path / "b", split) != rows(tmp_path / "c", split)


def test_distracting_numbers_are_none_that_matter():
    names = all_names()[1]
    for seed in range(50):
        problem = compose(random.Random(seed), names, steps=4, distractors=8, highest=99)
        matter = set().union(*(quantity.numbers for quantity in problem.needed))
        others = [quantity for quantity in problem.stated if quantity not in problem.needed]
        assert len(others) == 8
        assert not matter & {quantity.value for quantity in others}
        assert not matter & {quantity.number for quantity in others if quantity.kind != "times"}


def test_more_people_than_there_are_names_for_are_refused(tmp_path):
    with pytest.raises(ValueError, match="need 216 people"):
        make_arithmetic(tmp_path, distractors=50)

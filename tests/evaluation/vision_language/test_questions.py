"""Question files: their tasks and images, and rows that are refused."""

import json

import pytest

from diffvision.evaluation.vision_language.questions import read_sets
from diffvision.evaluation.vision_language.scores import score


def test_a_folders_files_are_read_and_know_their_tasks(questions):
    sets = read_sets([str(questions)])
    assert {one.name: one.task for one in sets} == {"pope_random": "pope", "captions": "chair", "vqa": "vqa"}
    assert [len(one.rows) for one in sets] == [2, 12, 3]
    assert [one.name for one in read_sets([str(questions)], tasks=["vqa", "pope"])] == ["pope_random", "vqa"]


def test_images_are_found_next_to_the_questions_or_in_the_folder_that_is_named(questions, tmp_path):
    file = questions / "vqa.json"
    (one,) = read_sets([str(file)])
    assert one.image_paths(one.rows[2]) == [questions / "images" / "1.png", questions / "images" / "2.png"]
    moved = (questions / "images").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="--images"):
        read_sets([str(file)])
    assert read_sets([str(file)], str(moved))[0].images == moved
    assert read_sets([str(file)], has_images=False)


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ('{"question_id": 1, "image": "a.png", "label": "yes"}', "line 1 of .*text"),
        ('{"question_id": 1, "image": "a.png", "text": "?"}', "line 1 of .*label"),
        ('{"question_id": 1, "image": "a.png", "text": "?", "label": true}', "line 1 of .*label"),
        ('{"question_id": 1, "image": "a.png", "text": "?", "label": {"text": "red"}}', "line 1 of .*label"),
        ('{"question_id": 1, "image": "a.png", "text": "?", "objects": "star"}', "line 1 of"),
        ("[" * 100_000, "line 1 of"),
        ('{"question_id": 1, "image": "a.png", "text": "?", "label": "no"}\n' * 2, "line 2 of .* again"),
        ('{"question_id": 1, "image": "a.png", "text": "?", "label": "no"}\nnonsense', "line 2 of"),
        ("", "is empty"),
        (
            '{"question_id": 1, "image": "a.png", "text": "?", "label": "no"}\n'
            '{"question_id": 2, "image": "a.png", "text": "?", "objects": ["no"]}',
            "two files",
        ),
    ],
)
def test_what_is_no_question_is_refused(tmp_path, lines, named):
    (tmp_path / "q.json").write_text(lines)
    with pytest.raises(ValueError, match=named):
        read_sets([str(tmp_path / "q.json")], has_images=False)


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        ("red", "red"),
        (["crimson", "red"], "Red."),
        ([{"answer": "red", "answer_confidence": "yes", "answer_id": 1}, {"answer": "crimson"}], "crimson"),
        ({"answer": "red"}, "red"),
        (2, "two"),
        (2.0, "2"),
    ],
)
def test_every_form_of_a_label_is_scored(tmp_path, label, answer):
    rows = [{"question_id": n, "image": "a.png", "text": "?", "label": label} for n in range(2)]
    (tmp_path / "q.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (one,) = read_sets([str(tmp_path / "q.json")], has_images=False)
    assert score(one, [answer, "another"])["q/exact_match"].mean() == 0.5


@pytest.mark.parametrize(("label", "task"), [(["Yes"], "pope"), (["no"] + ["yes"] * 9, "vqa")], ids=["pope", "vqa"])
def test_annotators_who_disagree_make_no_question_of_pope(label, task, tmp_path):
    (tmp_path / "q.json").write_text(json.dumps({"question_id": 1, "image": "a.png", "text": "?", "label": label}))
    (one,) = read_sets([str(tmp_path / "q.json")], has_images=False)
    assert one.task == task
    if task == "pope":
        assert score(one, ["yes"])["q/accuracy"].mean() == 1


def test_sets_that_are_missing_or_named_alike_are_refused(questions):
    with pytest.raises(ValueError, match="chair"):
        read_sets([str(questions / "vqa.json")], tasks=["chair"])
    with pytest.raises(ValueError, match="the name 'vqa'"):
        read_sets([str(questions / "vqa.json"), str(questions)])

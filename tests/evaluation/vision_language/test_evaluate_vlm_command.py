"""`evaluate-vlm`: models and answer files next to each other, what is printed and written, and what is refused."""

import json
import shutil

import pytest

from diffvision.cli import main
from diffvision.evaluation.vision_language.evaluate_vlm_command import run
from diffvision.evaluation.vision_language.questions import read_sets


@pytest.fixture
def answered(questions, tmp_path):
    """A folder of answers, all of them right."""
    right = {"pope_random": "label", "captions": None, "vqa": "label"}
    folder = tmp_path / "right"
    folder.mkdir()
    for one in read_sets([str(questions)]):
        texts = [row.get(right[one.name] or "", "a star") for row in one.rows]
        rows = [
            {"question_id": row["question_id"], "text": text[0] if isinstance(text, list) else str(text)}
            for row, text in zip(one.rows, texts, strict=True)
        ]
        (folder / f"{one.name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_answers_of_others_are_scored_without_a_model(questions, answered, tmp_path, capsys):
    shutil.rmtree(questions / "images")
    worse = shutil.copytree(answered, tmp_path / "worse")
    text = (worse / "pope_random.jsonl").read_text().replace('"no"', '"Yes, a moon and no star."')
    (worse / "pope_random.jsonl").write_text(text)
    (worse / "captions.jsonl").write_text(
        '{"question_id": 0, "text": "a star and two crescents"}\n{"question_id": 1, "text": ""}'
    )
    args = ["--data", str(questions), "--answers", f"{answered},other={worse}", "--output", str(tmp_path / "out")]
    assert main(["evaluate-vlm", *args, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    first, other = shown["right"], shown["other"]
    assert first["pope_random/accuracy"] == first["captions/recall"] == first["vqa/exact_match"] == 1
    assert first["pope_random/questions"] == 12
    assert first["vqa/held_out/exact_match"] == 1
    assert other["pope_random/yes_ratio"] == 1
    # "Yes, a moon and no star." has a no: LLaVA's parser reads it so.
    assert other["pope_random/llava/accuracy"] == 1
    assert other["pope_random/lmms_eval/accuracy"] == pytest.approx(4 / 12)
    assert other["pope_random/accuracy_mcnemar_p"] == pytest.approx(2 * 0.5**8)
    assert (other["captions/chair_i"], other["captions/chair_s"]) == (0.5, 0.5)
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written["models"] == shown
    assert [one["questions"] for one in written["sets"]] == ["2 questions", "12 questions", "3 questions"]


def test_synonyms_come_from_a_file_and_pope_has_a_mean_of_its_sets(questions, answered, tmp_path):
    (tmp_path / "synonyms.txt").write_text("star, sun\n")
    for folder, ending in ((questions, "json"), (answered, "jsonl")):
        shutil.copy(folder / f"pope_random.{ending}", folder / f"pope_popular.{ending}")
    results = run(data=str(questions), answers=str(answered), synonyms=str(tmp_path / "synonyms.txt"))["right"]
    assert results["captions/objects"] == 1
    assert results["pope/f1"] == results["pope/llava/f1"] == 1


def test_answers_of_a_model_are_kept_and_scored_again(vlm, questions, tmp_path):
    folder, out = tmp_path / "tiny", tmp_path / "out"
    vlm.module.save_pretrained(folder)
    vlm.processor.save_pretrained(folder)
    settings = {"data": str(questions), "output": str(out), "max_new_tokens": 4, "device": "cpu"}
    first = run(f"one={folder}", **settings)["one"]
    names = sorted(path.stem for path in (out / "answers" / "one").glob("*.jsonl"))
    assert names == ["captions", "pope_random", "vqa"]
    scored = run(answers=f"one={out / 'answers' / 'one'}", data=str(questions))["one"]
    assert str(scored) == str(first)

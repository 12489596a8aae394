import sys

import pytest
from PIL import Image

from diffvision import __version__, cli
from diffvision.models import language


def test_help_names_every_command(capsys):
    for arguments in ([], ["--help"]):
        assert cli.main(arguments) == 0
        printed = capsys.readouterr().out
        assert all(name in printed for name in [*cli.COMMANDS, *cli.TRAINER_COMMANDS, "run"])
        assert max(map(len, printed.splitlines())) <= 80
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"diffvision {__version__}\n"


@pytest.mark.parametrize("name", cli.command_names())
def test_every_command_explains_its_arguments(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([*name.split(), "--help"])
    assert stopped.value.code == 0
    assert f"usage: diffvision {name}" in capsys.readouterr().out


def test_data_make_lists_the_datasets(capsys):
    assert cli.main(["data", "make", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in ("digits", "folder", "pope"))
    assert cli.main(["data", "make"]) == 2
    assert "needs a dataset; see diffvision data make --help" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["data", "make", "digits", "--help"])
    printed = capsys.readouterr().out
    assert "--copies" in printed
    assert "--scenes" not in printed


def test_an_unknown_command_is_named(capsys):
    for words, text in [
        (["fitt"], "no command 'fitt'; did you mean fit? See diffvision --help"),
        (["evalute", "--help"], "no command 'evalute'; did you mean evaluate? See diffvision --help"),
        (["data", "mke"], "no command 'data mke'; did you mean data make? See diffvision --help"),
        (["data"], "data needs a command: make, check, tokenizer, tokenize; see diffvision --help"),
        (["qqq"], "no command 'qqq'; see diffvision --help"),
    ]:
        assert cli.main(words) == 2
        assert capsys.readouterr().err == f"diffvision: error: {text}\n"
    assert cli.main(["data", "--help"]) == 0
    assert "data make" in capsys.readouterr().out


def test_bad_input_is_one_line(capsys, tmp_path):
    assert cli.main(["data", "make", "digitz", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "digitz" in error
    assert "Traceback" not in error


def test_ctrl_c_is_one_line(capsys, tmp_path, monkeypatch):
    def stopped(directory, **options):
        (tmp_path / "out").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr("diffvision.data.datasets.stdlib.make_stdlib", stopped)
    out = str(tmp_path / "out")
    assert cli.main(["data", "make", "stdlib", out]) == 130
    line = f"diffvision: interrupted; {out} is incomplete: remove it and make it again\n"
    assert capsys.readouterr().err == line


def test_what_the_machine_refuses_is_one_line(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert cli.main(["data", "make", "stdlib", str(tmp_path / "file" / "deeper")]) == 1
    error = capsys.readouterr().err
    assert "diffvision: error: " in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("command", "status", "line"),
    [
        (
            "evaluate CLIP-debug --data photos --checkpoint FILE",
            1,
            "FILE is damaged or no checkpoint (6 bytes), or holds",
        ),
        (
            "evaluate-language FILE --tasks needle",
            1,
            "FILE is damaged or no checkpoint (6 bytes), or holds",
        ),
        ("generate FILE --prompt hi", 1, "FILE is damaged or no checkpoint (6 bytes), or holds"),
        ("export FILE new", 1, "FILE is damaged or no checkpoint (6 bytes), or holds"),
        ("convert FILE new --to openclip", 1, "FILE is damaged or no checkpoint (6 bytes), or holds"),
        (
            "inspect CLIP-debug --image nope.jpg --output new",
            1,
            "nope.jpg",
        ),
        ("data make mmpv new", 1, "digits, "),
        ("data make mmpv new", 1, "; did you mean mmvp?"),
        ("data make digits new --seed -1", 1, "seed must be at least 0, got -1"),
        ("data make digits FILE/x", 1, "FILE/x/train: not a directory"),
        ("evaluate --model CLIP-debug --data .", 1, "give the model first, without --model: diffvision evaluate MODEL"),
        ("inspect --model=CLIP-debug --output new", 1, "give the model first, without --model: diffvision inspect"),
        ("evaluate --data .", 2, "the following arguments are required: model; see diffvision evaluate --help"),
        ("models --filter nope*", 1, "none of our models matches 'nope*': leave out --filter to see all"),
        ("models --filter zzz_diff_vit_bas*", 1, "matches 'zzz_diff_vit_bas*': the nearest names are diff_vit_base"),
        (
            "evaluate CLIP-debug",
            2,
            "the following arguments are required: data; see diffvision evaluate --help",
        ),
        ("generate FILE --prompt hi --top_k many", 2, "top_k must be int or null, got 'many'; see "),
        ("fit --config nope.yaml", 2, "no configuration file nope.yaml: give a path, or a recipe such as clip/debug"),
        ("fit CLIP --data photos", 2, ": for files write --data.train photos; see "),
        ("fit --model FILE --data ImageTextData", 2, "model must be the name of a class or null, got 'hello'"),
        ("fit --model.lr 3", 1, "settings of model are given without its class: name it, such as --model Contrast"),
        ("fit --model ContrastiveModule --model.model CLIP-debug --data.train x", 1, "such as --data ImageTextData"),
        ("fit CLIP --model.pretrained FILE", 1, "the weights of FILE are damaged, or hold Python objects"),
        ("fit CLIP --trainer.devices 0", 1, "`Trainer(devices='0')` value is not a valid input"),
    ],
)
def test_what_is_wrong_is_one_line_that_is_true(command, status, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "text.ckpt"
    file.write_text("hello\n")
    (tmp_path / "photos/cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "photos/cat/1.png")
    clip = "--model ContrastiveModule --model.model CLIP-debug --data ImageTextData --data.train . --data.batch_size 2"
    words = command.replace("FILE", str(file)).replace("CLIP ", f"{clip} --trainer.accelerator cpu ")
    assert exit_status(words.split()) == status
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("diffvision: error: ")
    assert line.replace("FILE", str(file)) in error


def exit_status(words):
    try:
        return cli.main(words)
    except SystemExit as stopped:
        return stopped.code


def test_a_package_that_a_command_needs_is_named(capsys, monkeypatch, tmp_path):
    language.save(language.create("diff-debug", vocab_size=20), tmp_path / "checkpoint")
    monkeypatch.delitem(sys.modules, "diffvision.models.language.hugging_face", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert cli.main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "folder")]) == 1
    assert "huggingface needs transformers: pip install 'diffvision[hf]'" in capsys.readouterr().err
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(
    ("form", "package", "extra"),
    [("onnx", "onnx", "export"), ("huggingface", "transformers", "hf")],
)
def test_a_missing_package_is_named_before_a_model_is_looked_for(form, package, extra, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["export", "CLIP-debug", "folder", "--to", form]) == 1
    assert f"{form} needs {package}: pip install 'diffvision[{extra}]'" in capsys.readouterr().err


def test_run_hands_over(tmp_path, capsys, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text("import sys; print(sys.argv[1:])")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")  # which `run` sets for the program's children
    assert cli.main(["run", str(program), "--x", "1"]) == 0
    assert capsys.readouterr().out == "['--x', '1']\n"
    assert cli.main(["run"]) == 2


def test_a_switch_needs_no_value(monkeypatch):
    seen = []

    def demo(output: str = "x", seeds: int = 1, language: bool = False) -> None:
        seen.append((output, seeds, language))

    monkeypatch.setattr("diffvision.demo.demo", demo)
    for words in (["--language"], ["--language", "--seeds", "2"], ["--language", "false"], ["--language=true"], []):
        assert cli.main(["demo", *words]) == 0
    assert seen == [("x", 1, True), ("x", 2, True), ("x", 1, False), ("x", 1, True), ("x", 1, False)]


def test_several_models_stand_in_a_row(monkeypatch):
    taken = []

    def command(models: "str | list[str]", *, tasks: str) -> None:
        taken.append((models, tasks))

    monkeypatch.setitem(cli.COMMANDS, "inspect", ("diffvision.inspection", "inspect", ""))
    monkeypatch.setattr("diffvision.inspection.inspect", command)
    for words in (["a=CLIP-debug", "diff-debug", "--tasks", "needle"], ["CLIP-debug,diff-debug", "--tasks=needle"]):
        assert cli.main(["inspect", *words]) == 0
    assert taken == [(["a=CLIP-debug", "diff-debug"], "needle"), ("CLIP-debug,diff-debug", "needle")]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("- a cat", ["- a cat"]),
        ("# 3", ["# 3"]),
        ("null", ["null"]),
        ("-3", ["-3"]),
        ("a: cat", "a: cat"),
        ("[a cat, a dog]", ["a cat", "a dog"]),
        ("[sic] a cat", "[sic] a cat"),
    ],
)
def test_a_text_is_taken_as_it_stands(given, meant, monkeypatch):
    taken = {}

    def command(*, text: "str | list[str] | None" = None) -> None:
        taken["text"] = text

    module, function, _ = cli.COMMANDS["inspect"]
    monkeypatch.setattr(f"{module}.{function}", command)
    for args in (["--text", given], [f"--text={given}"]):
        assert cli.main(["inspect", *args]) == 0
        assert taken.pop("text") == meant

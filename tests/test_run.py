"""`python -m diffvision.run` in a separate process, as people use it."""

import os
import subprocess
import sys

import pytest

from diffvision import cli
from diffvision.models import language


def run(*arguments, cwd):
    command = [sys.executable, "-m", "diffvision.run", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


CHILDREN = """
import subprocess, sys
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained("folder")).__module__)
sys.stdout.flush()
for code in (
    "import open_clip, timm; print(timm.is_model('diff_vit_debug'), 'DiffCLIP-debug' in open_clip.list_models());"
    "from transformers import AutoConfig; print(type(AutoConfig.for_model('diffllama_v2')).__module__)",
    "import sys; print('torch' in sys.modules, sys.was_customized)",
):
    subprocess.run([sys.executable, "-c", code], check=True)
"""


@pytest.mark.nightly
def test_a_module_and_its_child_processes_know_our_models_and_open_our_folders(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    language.save(language.create("diffv2-debug", vocab_size=20), tmp_path / "checkpoint")
    with pytest.warns(UserWarning, match="tokenizer"):
        assert cli.main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "folder")]) == 0
    (tmp_path / "program.py").write_text(CHILDREN)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("import sys; sys.was_customized = True")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(tmp_path / "site"))))
    )
    done = run("program", cwd=tmp_path)
    ours = "diffvision.models.language.modeling_diffllama_v2"
    assert done.stdout.splitlines() == [ours, "True True", ours, "False True"], done.stderr


def test_a_file_runs_as_main_with_our_models_and_a_package_that_it_needs_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/neighbour.py").write_text("import no_such_package.inner\n")
    (tmp_path / "folder/program.py").write_text(
        "import sys, timm, open_clip\n"
        'print(__name__, sys.argv[1:], timm.is_model("diff_vit_debug"), "DiffCLIP-debug" in open_clip.list_models())\n'
        "import neighbour\n"
    )
    done = run("folder/program.py", "--flag", "3", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stdout == "__main__ ['--flag', '3'] True True\n"
    (line,) = done.stderr.splitlines()
    assert "needs no_such_package" in line
    assert "docs/guides/programs.md" in line

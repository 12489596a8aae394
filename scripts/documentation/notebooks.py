"""Execute the notebooks of docs/tutorials, each in an empty folder, and print how long each took.

python scripts/documentation/notebooks.py                      # all of them, as .ci/nightly does; an error ends it
python scripts/documentation/notebooks.py --write NAME ...     # some, and keep what they print and draw
"""

import argparse
import os
import re
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"


def execute(path: Path) -> nbformat.NotebookNode:
    """Return the notebook with new outputs, and without what differs from one machine to the next."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        # Backends that show figures in the cell, and no colours or widths of a terminal.
        os.environ.update(MPLBACKEND="module://matplotlib_inline.backend_inline", NO_COLOR="1", COLUMNS="110")
        NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": folder}}, record_timing=False).execute()
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    return notebook


def joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Return the outputs with printed lines that follow each other as one."""
    whole: list[nbformat.NotebookNode] = []
    for output in outputs:
        last = whole[-1] if whole else {}
        if output.output_type == "stream" and last.get("name") == output.name:
            last.text += output.text
        else:
            whole.append(output)
    for output in whole:
        if output.output_type == "stream":
            output.text = final_lines(output.text)
    return [output for output in whole if output.output_type != "stream" or output.text.strip()]


def final_lines(text: str) -> str:
    """Return what a terminal shows in the end, of a progress bar its last state, without folders of the machine."""
    lines = "\n".join(line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n"))
    return re.sub(r"^/\S*/(?=diffvision/)", "", lines, flags=re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="notebooks, such as vit; all if none is named")
    parser.add_argument("--write", action="store_true", help="keep the outputs")
    settings = parser.parse_args()
    paths = [TUTORIALS / f"{name}.ipynb" for name in settings.names] or sorted(TUTORIALS.glob("*.ipynb"))
    for path in paths:
        start = time.monotonic()
        notebook = execute(path)
        if settings.write:
            nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()

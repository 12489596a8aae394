"""What both demos share: where the recipes lie, numbers with their spread, and the report's page."""

import base64
import html
import io
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

PACKAGE = Path(__file__).parent.parent


def recipe(name: str) -> Path:
    """A file of configs/, such as "clip/debug.yaml": beside the package in a clone, inside it in a wheel.

    Raises:
        FileNotFoundError: neither is there.
    """
    places = [folder / "configs" / name for folder in (PACKAGE.parent, PACKAGE)]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(f"the demo's recipe is in neither {places[0]} nor {places[1]}: reinstall diffvision")


def spread(values: Sequence[float], digits: int = 1) -> str:
    """The mean, and of several values the standard deviation."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def as_text(table: Table) -> str:
    """The table in plain characters."""
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(table)
    return console.export_text()


def html_page(title: str, table: str, sections: Sequence[tuple[str, str, bytes]], sample: str = "") -> str:
    """One HTML file with its pictures inside.

    Args:
        table: in plain characters.
        sections: (title, text, PNG) each.
        sample: text that is shown as it is, at the end.
    """
    body = "".join(
        f"<h2>{html.escape(heading)}</h2><p>{html.escape(text)}</p>"
        f'<img alt="{html.escape(heading)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        for heading, text, png in sections
    )
    body += f"<h2>Samples</h2><pre>{html.escape(sample)}</pre>" if sample else ""
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>diffvision demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
img {{ max-width: 100%; }} pre {{ line-height: 1.2; overflow-x: auto; }} p {{ color: #555; }}
</style>
<h1>{html.escape(title)}</h1>
<pre>{html.escape(table)}</pre>
{body}
</html>
"""

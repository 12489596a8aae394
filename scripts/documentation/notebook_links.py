"""Turns the links of rendered notebooks to other pages into those pages' addresses (a hook of mkdocs).

mkdocs does so for Markdown only. A link that leads nowhere is a warning, as there, and so an error of `--strict`.
"""

from __future__ import annotations

import logging
import posixpath
import re
from typing import Any

log = logging.getLogger("mkdocs.hooks.notebook_links")


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """Return the page with its relative links resolved."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html

    def resolved(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        target = files.get_file_from_path(
            posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), path))
        )
        if target is None:
            log.warning("%s links to %s, which is not there", page.file.src_uri, path)
            return match[0]
        return f'href="{target.url_relative_to(page.file)}{anchor}"'

    return re.sub(r'href="((?!https?:)[^"#]+\.(?:md|ipynb))(#[^"]*)?"', resolved, html)

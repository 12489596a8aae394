"""Markup -> plain text: reStructuredText as Sphinx has it, Perl's POD and HTML. Where it comes from is in `text`.

Prose becomes a line for each paragraph; code stays as it is; what only a program reads (targets, indices, options,
navigation) is left out.
"""

import re
from html.parser import HTMLParser
from textwrap import dedent

_INDENT = "    "
# --- reStructuredText

_DIRECTIVE = re.compile(r"\s*\.\. (?:\|[^|]+\| +)?(?P<name>\w[\w:+.-]*)::(?:\s+(?P<argument>.*))?$")
_EXPLICIT = re.compile(r"\s*(?:\.\.|__)(?:\s|$)")
_FOOTNOTE = re.compile(r"\s*\.\. (\[[^\]]+\]\s.*)")
_OPTION = re.compile(r"\s*:[\w-]+:(?:\s|$)")
_ITEM = re.compile(r"(?:[-*+\u2022]|\(?(?:\d+|#|[a-zA-Z])[.)]|\|)\s+(?=\S)|(?=:[^:`\n]+:\s)|(?=>>>)")
_SECTION = re.compile(r"([=\-`:'\"~^_*+#<>.%])\1{2,}$")
_SIMPLE_TABLE = re.compile(r"=+(?:\s+=+)+$")
_GRID_LINE = re.compile(r"\+[-=+]+\+$")
_DROPPED = frozenset(
    {
        "toctree",
        "index",
        "image",
        "module",
        "currentmodule",
        "py:module",
        "py:currentmodule",
        "sectionauthor",
        "moduleauthor",
        "codeauthor",
        "include",
        "contents",
        "highlight",
        "highlightlang",
        "raw",
        "tabularcolumns",
        "kernel-doc",
        "kernel-figure",
        "kernel-render",
        "kernel-abi",
        "kernel-feat",
        "default-domain",
        "c:namespace",
        "c:namespace-push",
        "c:namespace-pop",
        "meta",
        "replace",
        "date",
        "unicode",
        "sectnum",
        "role",
        "literalinclude",
        "testsetup",
        "testcleanup",
        "miscnews",
        "only-html",
        "auto",
        "maintainers-include",
        "graphviz",
        "audit-event",
        "audit-event-table",
    }
)
_CODE = frozenset(
    {
        "code",
        "code-block",
        "sourcecode",
        "parsed-literal",
        "doctest",
        "testcode",
        "testoutput",
        "productionlist",
        "math",
    }
)
_LABELS = {
    "note": "Note:",
    "warning": "Warning:",
    "attention": "Attention:",
    "caution": "Caution:",
    "danger": "Danger:",
    "important": "Important:",
    "hint": "Hint:",
    "tip": "Tip:",
    "seealso": "See also:",
    "availability": "Availability:",
    "versionadded": "New in version",
    "versionchanged": "Changed in version",
    "deprecated": "Deprecated since version",
    "deprecated-removed": "Deprecated, and removed in version",
    "impl-detail": "CPython implementation detail:",
}
_WITHOUT_ARGUMENT = frozenset({"tabs", "epigraph", "glossary", "hlist", "figure", "kernel-figure"})
_NUMBERED = {"pep": "PEP", "rfc": "RFC", "issue": "issue", "gh": "issue"}
_INLINE = re.compile(
    r"``(?P<literal>.+?)``"
    r"|:(?P<role>[A-Za-z][\w:+.-]*):`(?P<target>[^`]*)`"
    r"|`(?P<link>[^`<]+?)\s*<[^`>]*>`_{0,2}"
    r"|`(?P<plain>[^`]+)`_{0,2}"
    r"|\*\*(?P<strong>\S(?:.*?\S)??)\*\*"
    r"|(?<![\w*])\*(?P<emphasis>[^\s*](?:[^*]*[^\s*])?)\*(?![\w*])"
    r"|(?<![\w|])\|(?P<substitution>\w[^|\n]*\w)\|_{0,2}(?![\w|])"
    r"|(?P<footnote>\[[\w#*.-]+\])_(?!\w)"
    r"|(?<![\w.])(?P<reference>[A-Za-z][\w.-]*[A-Za-z0-9])__?(?=[\s.,;:)]|$)"
    r"|\\(?P<escaped>.)"
)


def rst(text: str) -> str:
    """Return the text of a reStructuredText document."""
    out: list[str] = []
    _rst_lines(text.expandtabs(8).splitlines(), out)
    return _tidy("\n".join(out))


def _rst_lines(lines: list[str], out: list[str]) -> None:
    """Append the text of lines to `out`."""
    number = 0
    while number < len(lines):
        line = lines[number]
        stripped = line.strip()
        directive = _DIRECTIVE.match(line)
        if not stripped:
            out.append("")
            number += 1
        elif directive:
            block, number = _block(lines, number)
            out.append("")
            _directive(directive["name"].lower(), directive["argument"] or "", block, out)
            out.append("")
        elif _EXPLICIT.match(line):
            note = _FOOTNOTE.match(line)
            block, number = _block(lines, number)
            if note:
                _rst_lines([note[1], *dedent("\n".join(block)).splitlines(), ""], out)
        elif _SIMPLE_TABLE.match(stripped):
            number = _simple_table(lines, number, out)
        elif _SECTION.match(stripped) or _GRID_LINE.match(stripped):
            number += 1
        elif stripped.startswith("|") and stripped.endswith("|") and len(stripped) > 2:
            out.append(_inline("  ".join(cell.strip() for cell in stripped.strip("|").split("|")).strip()))
            number += 1
        else:
            number = _paragraph(lines, number, out)


def _paragraph(lines: list[str], number: int, out: list[str]) -> int:
    """Append a paragraph, or an item of a list, as one line, with the code that follows it."""
    indent = _indent(lines[number])
    # A row of a list-table is a list in a list.
    words = [re.sub(r"^[*-] +(?=- )", "", lines[number].strip())]
    item = _ITEM.match(words[0])
    text_indent = indent + (len(item[0]) if item else 0)
    first, number = number, number + 1
    while number < len(lines) and lines[number].strip():
        stripped = lines[number].strip()
        joins = text_indent <= _indent(lines[number]) if item else _indent(lines[number]) == indent
        if not joins or _ITEM.match(stripped) or _EXPLICIT.match(lines[number]) or _SECTION.match(stripped):
            break
        words.append(stripped)
        number += 1
    text = " ".join(words)
    code = text.endswith("::")
    if code:
        text = text.removesuffix("::").rstrip() + (":" if text != "::" else "")
    if text.startswith(">>>"):
        out.append(" " * indent + text)
    elif text:
        out.append(" " * indent + _inline(text))
    if code:
        block, number = _block(lines, number - 1, text_indent)
        _code(block, out, text_indent)
    return max(number, first + 1)


def _block(lines: list[str], number: int, indent: int | None = None) -> tuple[list[str], int]:
    """Return the lines below one that are indented further, and the number of the line after them."""
    indent = _indent(lines[number]) if indent is None else indent
    end = number + 1
    while end < len(lines) and (not lines[end].strip() or _indent(lines[end]) > indent):
        end += 1
    return lines[number + 1 : end], end


def _directive(name: str, argument: str, block: list[str], out: list[str]) -> None:
    """Append what a directive shows."""
    if name in _DROPPED:
        return
    while block and (_OPTION.match(block[0]) or (not block[0].strip() and len(block) > 1 and _OPTION.match(block[1]))):
        block = block[1:]
    if name in _CODE:
        if name in ("math", "productionlist") and argument:
            out.append(_INDENT + argument)
        _code(block, out)
        return
    head = [] if name in _WITHOUT_ARGUMENT else [argument.strip()]
    while block and block[0].strip() and name not in _LABELS and argument:
        # Further signatures, or a signature on several lines.
        if not _OPTION.match(block[0]):
            head.append(block[0].strip())
        block = block[1:]
    label = _LABELS.get(name, "")
    body = dedent("\n".join(block)).strip("\n").splitlines()
    if label:
        colon = ":" if body and not label.endswith(":") else ""
        body, head = [f"{label} {argument.strip()}{colon}".strip(), *body], []
    out.extend([*(_inline(line.removesuffix("\\")) for line in head if line), ""])
    _rst_lines(body, out)


def _code(block: list[str], out: list[str], indent: int = 0) -> None:
    """Append code as it is, indented."""
    code = dedent("\n".join(block)).strip("\n")
    out.extend(["", *((" " * indent + _INDENT + line).rstrip() for line in code.splitlines()), ""])


def _simple_table(lines: list[str], number: int, out: list[str]) -> int:
    """Append the rows of a table between lines of `==== ====`."""
    borders = 0
    out.append("")
    while number < len(lines):
        stripped = lines[number].strip()
        border = bool(_SIMPLE_TABLE.match(stripped))
        borders += border
        if stripped and not border and set(stripped) - set("- "):
            out.append(_inline(stripped))
        number += 1
        ended = border and borders >= 2 and (number == len(lines) or not lines[number].strip())
        if ended or (borders < 2 and not stripped and number < len(lines) and not lines[number].startswith(" ")):
            break
    out.append("")
    return number


def _inline(text: str) -> str:
    """Return a line without roles, emphasis, links and escapes."""
    return _INLINE.sub(_inline_text, text)


def _inline_text(match: re.Match[str]) -> str:
    if (role := match["role"]) is not None:
        target = match["target"]
        titled = re.match(r"(.+?)\s*<[^<>]*>$", target, re.DOTALL)
        target = titled[1] if titled else target.lstrip("!")
        if target.startswith("~"):
            target = target[1:].rpartition(".")[2]
        return f"{_NUMBERED[role]} {target}" if role in _NUMBERED and not titled else target
    if match["escaped"] is not None:
        return match["escaped"].strip()
    return next((value for value in match.groups() if value is not None), "")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


# --- POD

_POD_NESTED = re.compile(r"([A-Z])(?:<<<+\s(.*?)\s>>>+|<<\s(.*?)\s>>)")
_POD_PLAIN = re.compile(r"([A-Z])<([^<>]*)>")
_POD_ESCAPES = {"lt": "\ue000", "gt": "\ue001", "sol": "/", "verbar": "|", "quot": '"', "amp": "&", "nbsp": " "}


def pod(text: str) -> str:
    """Return the text of a file in Perl's POD."""
    out: list[str] = []
    hidden = bullet = False
    for paragraph in re.split(r"\n[ \t]*\n", text.expandtabs(8)):
        paragraph = paragraph.strip("\n")
        command, _, argument = paragraph.partition(" ") if paragraph.startswith("=") else ("", "", paragraph)
        if command.startswith(("=begin", "=end")):
            hidden = command.startswith("=begin")
        elif hidden or not paragraph.strip():
            continue
        elif command == "=item":
            bullet = argument.strip() == "*"
            out.append("" if bullet else _pod_inline(argument))
        elif command.startswith("=head"):
            out.append(_pod_inline(argument))
        elif not command and paragraph[0] == " ":
            out.append("\n".join((_INDENT + line).rstrip() for line in dedent(paragraph).splitlines()))
        elif not command:
            out.append("- " * bullet + _pod_inline(paragraph))
            bullet = False
    return _tidy("\n\n".join(part for part in out if part))


def _pod_inline(text: str) -> str:
    """Return a paragraph as one line, without formatting codes."""
    text = re.sub(r"E<(\w+)>", lambda m: _POD_ESCAPES.get(m[1]) or _character(m[1]), " ".join(text.split()))
    text = _POD_NESTED.sub(lambda m: _pod_code(m[1], _hide(m[2] or m[3])), text)
    while (plain := _POD_PLAIN.sub(lambda m: _pod_code(m[1], m[2]), text)) != text:
        text = plain
    return text.replace("\ue000", "<").replace("\ue001", ">")


def _hide(text: str) -> str:
    """Return text whose brackets are no formatting codes."""
    return text.replace("<", "\ue000").replace(">", "\ue001")


def _pod_code(code: str, content: str) -> str:
    if code in "XZ":
        return ""
    if code != "L":
        return content
    title, bar, target = content.partition("|")
    if bar:
        return title
    page, slash, section = target.partition("/") if not title else title.partition("/")
    if not slash or "://" in content:
        return content
    section = section.strip('"')
    return f'"{section}" in {page}' if page else f'"{section}"'


def _character(name: str) -> str:
    number = name.removeprefix("0x")
    try:
        return chr(int(number, 16 if name != number else 10))
    except ValueError:
        return name


# --- HTML

_HIDDEN_TAGS = frozenset(
    {
        "script",
        "style",
        "head",
        "nav",
        "header",
        "footer",
        "aside",
        "noscript",
        "svg",
        "button",
        "form",
        "select",
        "title",
    }
)
_HIDDEN_CLASSES = frozenset(
    {"navheader", "navfooter", "docnav", "toc", "footer-nav", "nav-chapters", "nav-wrapper", "menu-bar", "sidebar-nav"}
)
_HIDDEN_IDS = frozenset({"banner", "title", "sidebar", "menu-bar"})
_BLOCKS = frozenset(
    {
        "p",
        "div",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "pre",
        "ul",
        "ol",
        "dl",
        "table",
        "section",
        "article",
        "blockquote",
        "main",
        "hr",
        "body",
        "figure",
        "details",
        "summary",
    }
)
_LINES = frozenset({"li", "tr", "dt", "dd", "br", "caption", "figcaption"})
_VOID = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr"}
)


def html(text: str) -> str:
    """Return the text of an HTML page, without its navigation."""
    page = _Page()
    page.feed(text)
    page.close()
    return _tidy("".join(page.out))


class _Page(HTMLParser):
    """Collects text.

    Attributes:
        out: pieces of text.
    """

    def __init__(self) -> None:
        super().__init__()
        self.out: list[str] = []
        self._hidden: list[str] = []
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a block, or leave out what is navigation."""
        if self._hidden:
            if tag == self._hidden[0] and tag not in _VOID:
                self._hidden.append(tag)
            return
        values = dict(attrs)
        classes = set((values.get("class") or "").split())
        if tag in _HIDDEN_TAGS or classes & _HIDDEN_CLASSES or values.get("id") in _HIDDEN_IDS:
            if tag not in _VOID:
                self._hidden.append(tag)
            return
        self._pre += tag == "pre"
        self._break(tag)
        if tag == "li":
            self.out.append("- ")
        elif tag in ("td", "th") and self.out and not self.out[-1].endswith("\n"):
            self.out.append("  ")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Treat `<a/>` as an element without content, as XHTML does."""
        if tag in _VOID and not self._hidden:
            self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        """End a block."""
        if self._hidden:
            if tag == self._hidden[0]:
                self._hidden.pop()
            return
        self._break(tag)
        if tag == "pre":
            self._pre = max(self._pre - 1, 0)

    def handle_data(self, data: str) -> None:
        """Collect text, its white space as a browser shows it."""
        if self._hidden:
            return
        if not self._pre:
            data = re.sub(r"\s+", " ", data)
            if not self.out or self.out[-1][-1:] in "\n ":
                data = data.lstrip()
        if data:
            self.out.append(data)

    def _break(self, tag: str) -> None:
        if tag in _BLOCKS and not (self.out and self.out[-1] == "- "):
            self.out.append("\n\n")
        elif tag in _LINES and self.out and not self.out[-1].endswith("\n"):
            self.out.append("\n")


def _tidy(text: str) -> str:
    """Return text without spaces at the ends of lines, and with one empty line at most in a row."""
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n")

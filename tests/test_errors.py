"""The first line of every error that a user can cause has at most 120 characters, values that are filled in aside."""

import ast
from pathlib import Path

import diffvision

PACKAGE = Path(diffvision.__file__).parent
KINDS = {"ValueError", "TypeError", "OSError", "FileNotFoundError", "RuntimeError", "Mistake", "BadSource"}
MOST = 120


def template(node: ast.expr) -> str:
    """Return the text of a message without its values."""
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_the_first_line_of_an_error_is_short():
    raised = [
        (f"{path.relative_to(PACKAGE)}:{node.lineno}", template(node.exc.args[0]))
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
        if ast.unparse(node.exc.func) in KINDS
    ]
    assert len(raised) > 500
    assert [(place, text) for place, text in raised if len(text.partition("\n")[0]) > MOST] == []

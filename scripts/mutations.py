"""Change one line of the package at a time, in a copy of the last commit, and record which of its tests finds it.

`mutations.py draw SEED COUNT LEFT_OUT PACKAGE ...`, then `mutations.py run NAME`, which goes on where it stopped and
lists what is "lost": found in the first run, and not in this one. A line is found by its text, or "gone".
"""

import ast
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests/assets/mutations.json"
TESTS = {"opening": "tests/test_opening.py"}  # of other packages: those in the folder of that name


def find(node):
    """Yield (kind, expression, new expression) in code: no messages, annotations or decorators."""
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.keyword(arg="stacklevel"):
            return
        case ast.Compare(ops=[_]):
            yield "comparison", node, ast.UnaryOp(ast.Not(), node)
        case ast.Constant(bool() | int() | float() as value):
            yield "constant", node, ast.Constant(not value if isinstance(value, bool) else value + 1)
        case ast.If(test, [ast.Raise() | ast.Return() | ast.Continue()], []):
            yield "guard", test, ast.Constant(False)
        case ast.Call(function, [first, second, *rest], keywords) if ast.unparse(function) not in ("isinstance", "max"):
            yield "arguments", node, ast.Call(function, [second, first, *rest], keywords)
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in ("annotation", "returns", "decorator_list"):
                yield from find(child)


def draw(package, seed, count, left_out):
    """Return changes of a package, as many of each kind."""
    kinds: dict[str, list] = {"guard": [], "comparison": [], "constant": [], "arguments": []}
    for path in sorted((ROOT / "diffvision" / package).rglob("*.py")):
        file, lines = str(path.relative_to(ROOT)), path.read_text().split("\n")
        tree = ast.parse("\n".join(lines))
        for kind, old, new in () if re.search(left_out, file) else find(tree):
            row, line = old.lineno - 1, lines[old.lineno - 1].encode()
            text = (line[: old.col_offset] + ast.unparse(new).encode() + line[old.end_col_offset :]).decode()
            whole = "\n".join([*lines[:row], text, *lines[row + 1 :]])
            if old.end_lineno == old.lineno and ast.dump(ast.parse(whole)) != ast.dump(tree):
                kinds[kind].append({"file": file, "lines": lines[row - 1 : row + 2], "new": text, "found": {}})
    chance = random.Random(f"{package} {seed}")
    return [change for i, kind in enumerate(kinds.values()) for change in chance.sample(kind, (count + i) // 4)]


def failing(tests, copy):
    """Return the first test that fails, or all if none is named, or nothing if all pass."""
    command = f"env PYTHONPATH={copy} PYTHONDONTWRITEBYTECODE=1 timeout -sKILL 900 {sys.executable} -m pytest -n0 -x"
    run = subprocess.run([*command.split(), "-pno:cacheprovider", *tests], cwd=copy, capture_output=True, text=True)
    return run.returncode and (re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", run.stdout, re.MULTILINE)[:1] or tests)


def judge(package, change, copy):
    """Return the test that finds a change, "no" or "gone". Tests named after its file run first."""
    before, line, after = (re.escape(text.strip()) for text in change["lines"])
    files = sorted(copy.glob(f"diffvision/{package}/**/*.py"), key=lambda path: path != copy / change["file"])
    tests = [test.relative_to(copy) for test in sorted(copy.glob(TESTS.get(package, f"tests/{package}/**/test_*.py")))]
    for near in (rf"{before}\n\s*({line})\n\s*{after}", rf"{before}\n\s*({line})", rf"({line})\n\s*{after}"):
        for path in files:
            if place := re.search(rf"^\s*{near}$", text := path.read_text(), re.MULTILINE):
                path.write_text(text[: place.start(1)] + change["new"].strip() + text[place.end(1) :])
                run = sorted(tests, key=lambda test: test.stem != f"test_{path.stem}")
                while (failed := failing(run, copy)) and not failing(failed, copy):
                    run += [f"--deselect={failed[0]}"]  # it fails now and then
                path.write_text(text)
                assert not failed or not failing(failed, copy), f"{failed} fails without the change"
                return str(failed[0]) if failed else "no"
    return "gone"


if __name__ == "__main__":
    action, name, *rest = sys.argv[1:]
    changes = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if action == "draw":
        changes |= {package: draw(package, name, int(rest[0]), rest[1]) for package in rest[2:]}
    with tempfile.TemporaryDirectory() as copy:
        subprocess.run(f"git archive HEAD | tar -x -C {copy}", shell=True, check=True, cwd=ROOT)
        for package, change in [(key, change) for key, drawn in changes.items() for change in drawn]:
            if action == "run" and name not in change["found"]:
                change["found"][name] = judge(package, change, Path(copy))
            RECORD.write_text(json.dumps(changes, indent=1, ensure_ascii=False) + "\n")
            lost = change["found"].get(name) == "no" != next(iter(change["found"].values()))
            print("lost" if lost else "", change["found"].get(name), change["file"], change["new"].strip(), flush=True)

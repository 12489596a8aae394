"""Remove `raise` statements, one at a time, and report which removals no test notices.

    pytest --cov=diffvision --cov-context=test --cov-report=
    python scripts/remove_raises.py --count 50 --seed 0

The first command records in .coverage which tests execute which lines. The second draws the statements by the seed and
runs, for each, up to `--tests` of the tests that execute it, in a copy of the checkout.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).parents[1]


def find_raises(package: Path) -> list[tuple[Path, ast.Raise]]:
    """Return all `raise` statements of a package that name an exception."""
    return [
        (path, node)
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and node.exc is not None
    ]


def without(path: Path, node: ast.Raise) -> str:
    """Return the text of a file with one statement replaced by `pass`."""
    lines = path.read_bytes().splitlines(keepends=True)
    assert node.end_lineno is not None
    first, last = lines[node.lineno - 1], lines[node.end_lineno - 1]
    lines[node.lineno - 1 : node.end_lineno] = [first[: node.col_offset] + b"pass" + last[node.end_col_offset :]]
    return b"".join(lines).decode()


def find_tests(data: CoverageData, path: Path, node: ast.Raise, limit: int) -> list[str]:
    """Return tests that execute a statement, at most `limit` of them."""
    contexts = data.contexts_by_lineno(str(path)).get(node.lineno, [])
    return sorted({context.partition("|")[0] for context in contexts if "::" in context})[:limit]


def main() -> int:
    """Print one line for each statement, and return 1 if a removal goes unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", type=int, default=20)
    args = parser.parse_args()
    data = CoverageData(str(ROOT / ".coverage"))
    data.read()
    drawn = random.Random(args.seed).sample(find_raises(ROOT / "diffvision"), args.count)
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        ignored = shutil.ignore_patterns(".git", "__pycache__", "site", "runs", "data", ".coverage*")
        for part in ("diffvision", "tests", "scripts", "configs", "docs", "pyproject.toml", "README.md"):
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, copy / part, ignore=ignored if part != "diffvision" else None)
            else:
                shutil.copy(source, copy / part)
        for number, (path, node) in enumerate(drawn, 1):
            place = path.relative_to(ROOT)
            tests = find_tests(data, path, node, args.tests)
            target = copy / place
            target.write_text(without(path, node))
            command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", *tests]
            run = tests and subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, timeout=600, check=False
            )
            result = "no test executes it" if not run else "NOT NOTICED" if run.returncode == 0 else "noticed"
            unnoticed += result != "noticed"
            print(f"{number:3} {result:20} {place}:{node.lineno}  {ast.unparse(node)[:80]}", flush=True)
            shutil.copy(path, target)
    print(f"{args.count - unnoticed} of {args.count} removals make a test fail")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Print the size of the package: a figure to hold against the next change.

    python scripts/package_size.py [--package FOLDER] [--no-import]

Code lines are lines with a statement on them: no blank lines, comments or docstrings.
"""

import argparse
import ast
import io
import statistics
import subprocess
import sys
import time
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def count_code_lines(source: str, tree: ast.Module) -> int:
    """Return how many lines hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in TEXT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def measure(paths: list[Path]) -> dict[str, float]:
    """Return the figures of some files together."""
    sources = [path.read_text() for path in paths]
    trees = [ast.parse(source) for source in sources]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    lengths = sorted(
        (node.end_lineno or 0) - node.lineno + 1
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    code = sum(map(count_code_lines, sources, trees))
    return {
        "files": len(paths),
        "lines": sum(len(source.splitlines()) for source in sources),
        "code lines": code,
        "statements": sum(isinstance(node, ast.stmt) for node in nodes),
        "functions": len(lengths),
        "median lines of a function": statistics.median(lengths),
        "95th percentile": lengths[len(lengths) * 95 // 100],
        "raises per 1,000 code lines": round(1000 * sum(isinstance(node, ast.Raise) for node in nodes) / code, 1),
    }


def time_imports(package: Path, repeats: int = 5) -> dict[str, float]:
    """Return the least seconds, of several processes, that importing a module takes."""
    seconds = {}
    for module in (package.name, f"{package.name}.models.vit", f"{package.name}.training.fit"):
        command = [sys.executable, "-c", f"import {module}"]
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            if subprocess.run(command, cwd=package.parent, capture_output=True, check=False).returncode:
                break
            times.append(time.perf_counter() - begin)
        if times:
            seconds[f"import {module}, seconds"] = round(min(times), 2)
    return seconds


def main() -> None:
    """Print the figures, one row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=ROOT / "diffvision")
    parser.add_argument("--no-import", action="store_true", help="leave out the seconds that imports take")
    args = parser.parse_args()
    package = args.package.resolve()
    paths = sorted(package.rglob("*.py"))
    columns = {"all": measure(paths)}
    print(f"{'':30}" + "".join(f"{name:>10}" for name in columns))
    for row in columns["all"]:
        print(f"{row:30}" + "".join(f"{figures[row]:>10,}" for figures in columns.values()))
    if not args.no_import:
        for row, value in time_imports(package).items():
            print(f"{row:50}{value:>6}")


if __name__ == "__main__":
    main()

"""Records the signatures that `ops/attention/flash.py` calls: `flash_signatures.py "NAME VERSION=FILE" ... > JSON`.

FILE is the source of the package's interface, which is read and not imported, since it needs CUDA to import:
flash_attn/flash_attn_interface.py in flash-attn's sdist, flash_attn/cute/interface.py in flash-attn-4's wheel,
hopper/flash_attn_interface.py in a clone of Dao-AILab/flash-attention. tests/assets/flash_signatures.json holds the
result: package -> function -> its parameters in order, with True where there is a default.
"""

import ast
import json
import sys
from pathlib import Path

FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func")


def read_signatures(source: str) -> dict[str, dict[str, bool]]:
    signatures = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
            given = node.args
            assert not any([given.posonlyargs, given.kwonlyargs, given.vararg, given.kwarg]), node.name
            required = len(given.args) - len(given.defaults)
            signatures[node.name] = {one.arg: i >= required for i, one in enumerate(given.args)}
    return signatures


if __name__ == "__main__":
    files = (argument.rpartition("=") for argument in sys.argv[1:])
    print(json.dumps({name: read_signatures(Path(file).read_text()) for name, _, file in files}, indent=1))

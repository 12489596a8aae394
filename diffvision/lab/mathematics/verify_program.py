"""Compares answers by the library math-verify: the program of a child process, which needs nothing of this package."""

import functools
from typing import Any

try:
    import math_verify
except ModuleNotFoundError as error:
    math_verify = None
    _missing = error


def answer(request: list[str]) -> bool:
    """Return whether the library takes the second text for the first one, the right answer."""
    if math_verify is None:
        raise _missing
    gold, given = request
    return bool(math_verify.verify(_parse(gold), _parse(given)))


@functools.lru_cache(maxsize=10_000)
def _parse(text: str) -> Any:
    # LaTeX is recognised between dollars alone.
    return math_verify.parse(f"${text.strip().strip('$')}$")

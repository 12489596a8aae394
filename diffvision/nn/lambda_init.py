"""The initial value of lambda, by layer: the schedule over depth that `lambda_init="depth"` selects."""

import math
from typing import Literal


def depth_lambda_init(depth: int) -> float:
    """Return 0.8 - 0.6 exp(-0.3 depth), with depth from 0 (arXiv 2410.05258 section 2.1 counts layers from 1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


def resolve_lambda_init(lambda_init: float | Literal["depth"], depth: int) -> float:
    """Return lambda_init as a number, `depth_lambda_init(depth)` for "depth"; ValueError for other strings."""
    if isinstance(lambda_init, str) and lambda_init != "depth":
        raise ValueError(f"lambda_init must be a number or 'depth', got {lambda_init!r}")
    return depth_lambda_init(depth) if lambda_init == "depth" else float(lambda_init)

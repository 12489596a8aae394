"""The states of a process's random generators as plain values: Python's, numpy's, torch's and the GPU's."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch


def capture_random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of this process's generators: tensors and numbers, which load with weights_only=True.

    Args:
        device: the device that this process trains on.
    """
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = cast(Any, np.random.get_state())  # noqa: NPY002  (what transforms and mixup draw from)
    return {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "keys": torch.from_numpy(keys.astype(np.int64)),
            "place": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore a state of `capture_random_state`; one captured on a CPU leaves the GPU's generator unchanged."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, numpy["place"], numpy["has_gauss"], numpy["cached"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)

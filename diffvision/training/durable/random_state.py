"""The random generators of a process: Python's, numpy's, torch's and its GPU's, as plain values."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch


def captured(device: torch.device) -> dict[str, Any]:
    """The states of this process's generators: tensors and numbers, which load with weights_only=True.

    Args:
        device: the one that this process trains on; of other GPUs it draws nothing.
    """
    version, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = cast(Any, np.random.get_state())  # noqa: NPY002  (what transforms and mixup draw from)
    return {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "keys": torch.from_numpy(keys.astype(np.int64)),
            "place": int(place),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def put_back(state: dict[str, Any], device: torch.device) -> None:
    """Set this process's generators to what `captured` gave. A state of a CPU leaves the GPU's as it is."""
    python, own = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = own["keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, own["place"], own["has_gauss"], own["cached"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)

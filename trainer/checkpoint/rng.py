"""Random states of Python, numpy and torch as tensors and plain numbers, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.logs import get_logger

__all__ = ["capture_rng", "restore_rng"]

logger = get_logger(__name__)


def capture_rng() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """States of all global random generators of this process, for a .safetensors and a .json file.

    Returns:
        Integer tensors named rng.python, rng.numpy, rng.torch and, where a GPU is in use, rng.cuda (that of the
        current device); and the numbers that complete them.
    """
    version, words, gauss = random.getstate()
    # legacy=False gives the dictionary form for whichever bit generator is installed; ours is always MT19937.
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    tensors = {
        "rng.python": torch.tensor(words, dtype=torch.int64),
        "rng.numpy": torch.tensor(numpy_state["state"]["key"].astype(np.int64)),
        "rng.torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    numbers = {
        "python": {"version": version, "gauss": None if gauss is None else float(gauss).hex()},
        "numpy": {
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]).hex(),
        },
    }
    return tensors, numbers


def restore_rng(tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    """Bring all global random generators back to what capture_rng saw.

    A GPU's state is skipped, with a warning, where this process has no GPU or the checkpoint has no such state.
    """
    gauss = numbers["python"]["gauss"]
    words = tuple(tensors["rng.python"].tolist())
    random.setstate((numbers["python"]["version"], words, None if gauss is None else float.fromhex(gauss)))
    numpy_numbers = numbers["numpy"]
    key = tensors["rng.numpy"].numpy().astype(np.uint32)
    gauss_value = float.fromhex(numpy_numbers["gauss"])
    state = ("MT19937", key, numpy_numbers["pos"], numpy_numbers["has_gauss"], gauss_value)
    np.random.set_state(state)
    torch.set_rng_state(tensors["rng.torch"].cpu())
    if torch.cuda.is_available() and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"].cpu())
    elif torch.cuda.is_available() or "rng.cuda" in tensors:
        logger.warning("the checkpoint and this process differ in having a GPU: its random state is not restored")

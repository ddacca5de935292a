"""Other public RWKV-7 operators behind the interface of benchmarks/ops.py, for comparison in the same run.

    pip install flash-linear-attention==0.6.0

A peer gets the decay in its own parametrisation; turning ours into it is not timed. Peers without float32 state in and out
are not listed.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

__all__ = ["PEERS", "Peer", "installed"]

LOG_DECAY_SCALE = -0.60653065971263342  # -exp(-1/2)


class Peer:
    """flash-linear-attention's chunked operator. Its decay is the logarithm, its state is [key, value]."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    @staticmethod
    def decay(w_raw: Tensor) -> Tensor:
        """Log decay in the dtype of `w_raw` [B,T,H,64], ours before squashing, as the peer's own layer gives it."""
        return (LOG_DECAY_SCALE * torch.sigmoid(w_raw.float())).to(w_raw.dtype)

    def __call__(self, inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """Output [B,T,H,64] and outgoing state, from r, log w, k, v, a, b and the incoming state [B,H,key,value]."""
        from fla.ops.rwkv7 import chunk_rwkv7

        r, log_w, k, v, a, b = inputs
        bound = {"lower_bound": LOG_DECAY_SCALE, "chunk_size": 64} if self.chunk == 64 else {"chunk_size": self.chunk}
        return chunk_rwkv7(r, log_w, k, v, a, b, initial_state=state, output_final_state=True, **bound)


PEERS = {"fla_chunk16": Peer(16), "fla_chunk64": Peer(64)}


def installed() -> bool:
    """Whether the peers can be imported."""
    return importlib.util.find_spec("fla") is not None

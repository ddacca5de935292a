"""Texts of different lengths side by side, ending together, at constant memory.

Shorter rows begin with filling tokens, and the state is dropped where their text begins. So all rows end with the last
chunk, from which all can go on, and the result is that of each row alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.model.rwkv7 import RWKV7
from trainer.model.state import ModelState

__all__ = ["Chunk", "ContinuationScore", "read_rows", "score_continuations"]

_LOGIT_ROWS = 4096


class Chunk(NamedTuple):
    """What a model makes of one chunk of all rows."""

    start: int
    """Place of its first token, counted in the longest row."""
    hidden_BTC: Tensor
    state: ModelState


class ContinuationScore(NamedTuple):
    """How probable a continuation is."""

    log_probability: float
    """Sum over its tokens, in nats."""
    is_greedy: bool
    """Whether each of its tokens is the most probable one."""


@torch.no_grad()
def read_rows(model: RWKV7, rows: Sequence[Sequence[int]], chunk_tokens: int) -> Iterator[Chunk]:
    """Run rows of tokens, none empty, chunk by chunk; their last tokens are the last of the last chunk."""
    longest, device = max(map(len, rows)), model.ln_out.weight.device
    state = model.zero_state(len(rows))
    for start in range(0, longest, chunk_tokens):
        stop = min(start + chunk_tokens, longest)
        ids_BT = torch.zeros(len(rows), stop - start, dtype=torch.int64)
        reset_BT = torch.zeros(ids_BT.shape, dtype=torch.bool)
        for index, row in enumerate(rows):
            begin = longest - len(row)
            if begin < stop:
                here = torch.tensor(row[max(0, start - begin) : stop - begin], dtype=torch.int64)
                ids_BT[index, stop - start - len(here) :] = here
            if start <= begin < stop:
                reset_BT[index, begin - start] = True
        needs_reset = bool(reset_BT[:, 1:].any()) or (start > 0 and bool(reset_BT.any()))
        hidden_BTC, state = model(ids_BT.to(device), state, reset_BT.to(device) if needs_reset else None)
        yield Chunk(start, hidden_BTC, state)


def score_continuations(
    model: RWKV7, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], chunk_tokens: int = 2048
) -> list[ContinuationScore]:
    """How probable each continuation is after its context.

    Args:
        model: on its device.
        pairs: tokens of context (at least one) and continuation, all read side by side.
        chunk_tokens: tokens that are read at once.
    """
    rows = [[*context, *continuation][:-1] for context, continuation in pairs]
    # The last tokens of a row predict its continuation.
    begins = [max(map(len, rows)) - len(continuation) for _, continuation in pairs]
    totals = torch.zeros(len(rows), dtype=torch.float64)
    is_greedy = torch.ones(len(rows), dtype=torch.bool)
    for chunk in read_rows(model, rows, chunk_tokens):
        stop = chunk.start + chunk.hidden_BTC.shape[1]
        wanted = [range(max(chunk.start, begin), stop) for begin in begins]
        owner_R = torch.tensor([index for index, places in enumerate(wanted) for _ in places], dtype=torch.int64)
        place_R = torch.tensor([place for places in wanted for place in places], dtype=torch.int64)
        target_R = torch.tensor(
            [pairs[index][1][place - begins[index]] for index, places in enumerate(wanted) for place in places],
            dtype=torch.int64,
        )
        for owner, place, target in zip(*(x.split(_LOGIT_ROWS) for x in (owner_R, place_R, target_R)), strict=True):
            if len(owner):
                log_probability, greedy = _scores(model, chunk, owner, place, target)
                totals.index_add_(0, owner, log_probability)
                is_greedy[owner[~greedy]] = False
    return [ContinuationScore(float(total), bool(greedy)) for total, greedy in zip(totals, is_greedy, strict=True)]


def _scores(model: RWKV7, chunk: Chunk, owner_R: Tensor, place_R: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and whether it is the most probable token, on the CPU."""
    device = chunk.hidden_BTC.device
    target_R = target_R.to(device)
    logits_RV = model.head(chunk.hidden_BTC[owner_R.to(device), (place_R - chunk.start).to(device)]).float()
    picked_R = logits_RV.gather(1, target_R[:, None]).squeeze(1)
    is_greedy_R = logits_RV.argmax(1) == target_R
    return (picked_R - logits_RV.logsumexp(1)).double().cpu(), is_greedy_R.cpu()

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
from trainer.model.state import ModelState, map_state

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


@torch.no_grad()
def score_continuations(
    model: RWKV7, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], chunk_tokens: int = 2048
) -> list[ContinuationScore]:
    """How probable each continuation is after its context. Equal contexts are read once.

    Args:
        model: on its device.
        pairs: tokens of context (at least one) and continuation, all read side by side.
        chunk_tokens: tokens that are read at once.
    """
    contexts = {context: number for number, context in enumerate(dict.fromkeys(tuple(first) for first, _ in pairs))}
    for chunk in read_rows(model, list(contexts), chunk_tokens):
        last = chunk
    owner = torch.tensor([contexts[tuple(context)] for context, _ in pairs], device=last.hidden_BTC.device)
    state, hidden_BTC = map_state(lambda x: x[owner], last.state), last.hidden_BTC[owner, -1:]
    continuations = [continuation for _, continuation in pairs]
    scores = _Scores(model, continuations)
    scores.add(hidden_BTC, 0)
    longest = max(map(len, continuations))
    for start in range(0, longest - 1, chunk_tokens):
        ids_BT = torch.zeros(len(pairs), min(chunk_tokens, longest - 1 - start), dtype=torch.int64)
        for row, continuation in enumerate(continuations):
            here = torch.tensor(continuation[start : start + ids_BT.shape[1]], dtype=torch.int64)
            ids_BT[row, : len(here)] = here
        hidden_BTC, state = model(ids_BT.to(owner.device), state)
        scores.add(hidden_BTC, start + 1)
    return scores.result()


class _Scores:
    """Sums up log-probabilities of continuations."""

    def __init__(self, model: RWKV7, continuations: Sequence[Sequence[int]]) -> None:
        self.model, self.continuations = model, continuations
        self.totals = torch.zeros(len(continuations), dtype=torch.float64)
        self.is_greedy = torch.ones(len(continuations), dtype=torch.bool)

    def add(self, hidden_BTC: Tensor, start: int) -> None:
        """Score the tokens from place `start` of each continuation on, which this output predicts; others are ignored."""
        num = hidden_BTC.shape[1]
        wanted = [continuation[start : start + num] for continuation in self.continuations]
        row_R = torch.tensor([row for row, tokens in enumerate(wanted) for _ in tokens], dtype=torch.int64)
        place_R = torch.tensor([place for tokens in wanted for place in range(len(tokens))], dtype=torch.int64)
        target_R = torch.tensor([token for tokens in wanted for token in tokens], dtype=torch.int64)
        for part in zip(*(x.split(_LOGIT_ROWS) for x in (row_R, place_R, target_R)), strict=True):
            row, place, target = (x.to(hidden_BTC.device) for x in part)
            logits_RV = self.model.head(hidden_BTC[row, place]).float()
            picked_R = logits_RV.gather(1, target[:, None]).squeeze(1)
            self.totals.index_add_(0, part[0], (picked_R - logits_RV.logsumexp(1)).double().cpu())
            self.is_greedy[part[0][(logits_RV.argmax(1) != target).cpu()]] = False

    def result(self) -> list[ContinuationScore]:
        """The scores so far."""
        pairs = zip(self.totals.tolist(), self.is_greedy.tolist(), strict=True)
        return [ContinuationScore(total, greedy) for total, greedy in pairs]

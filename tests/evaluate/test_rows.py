"""Rows of different lengths give what each gives alone."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.evaluate.small_models import lively_model
from trainer.evaluate import rows
from trainer.evaluate.rows import read_rows, score_continuations
from trainer.model.state import state_tensors

MODEL = lively_model()
row = st.lists(st.integers(0, 271), min_size=1, max_size=70)


def logits(tokens):
    return MODEL.head(MODEL(torch.tensor([tokens]))[0][0])


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(row, min_size=1, max_size=4), chunk=st.integers(1, 40))
def test_rows_side_by_side_are_each_row_alone(texts, chunk):
    chunks = list(read_rows(MODEL, texts, chunk))
    assert [c.start for c in chunks] == list(range(0, max(map(len, texts)), chunk))
    hidden = torch.cat([c.hidden_BTC for c in chunks], 1)
    for index, tokens in enumerate(texts):
        alone, state = MODEL(torch.tensor([tokens]))
        torch.testing.assert_close(hidden[index, -len(tokens) :], alone[0], rtol=1e-3, atol=1e-4)
        for together, mine in zip(state_tensors(chunks[-1].state), state_tensors(state), strict=True):
            torch.testing.assert_close(together[index], mine[0], rtol=1e-3, atol=1e-4)


@settings(max_examples=25, deadline=None)
@given(pairs=st.lists(st.tuples(row, row), min_size=1, max_size=4), chunk=st.integers(1, 40))
def test_scores_are_sums_of_log_probabilities(pairs, chunk):
    for (context, continuation), score in zip(pairs, score_continuations(MODEL, pairs, chunk), strict=True):
        wanted = F.log_softmax(logits([*context, *continuation][:-1]), 1)[len(context) - 1 :]
        expected = wanted[torch.arange(len(continuation)), continuation].sum()
        assert score.log_probability == pytest.approx(float(expected), rel=1e-4, abs=1e-3)


def greedy(context, num):
    tokens = list(context)
    for _ in range(num):
        tokens.append(int(logits(tokens)[-1].argmax()))
    return tokens[len(context) :]


def test_greedy_continuations_are_told_from_others():
    context = [5, 90, 3]
    best = greedy(context, 4)
    wrong_first, wrong_last = [best[0] + 1, *best[1:]], [*best[:-1], best[-1] + 1]
    pairs = [(context, best), (context, wrong_first), (context, wrong_last), ([7, *context], best[:1])]
    found = [score.is_greedy for score in score_continuations(MODEL, pairs)]
    assert found[:3] == [True, False, False]


def test_equal_contexts_are_read_once(monkeypatch):
    context, answers = list(range(3, 60)), [[1, 2, 3], [1, 2], [9], [7, 7, 7, 7]]
    alone = [score_continuations(MODEL, [(context, answer)])[0] for answer in answers]
    read = []
    real = rows.read_rows
    monkeypatch.setattr(
        rows, "read_rows", lambda model, given, chunk: read.append(len(given)) or real(model, given, chunk)
    )
    together = score_continuations(MODEL, [(context, answer) for answer in answers], 2)
    assert read == [1]
    for found, wanted in zip(together, alone, strict=True):
        assert found == (pytest.approx(wanted.log_probability, rel=1e-4), wanted.is_greedy)

"""Recall of keys: what is asked, and what counts as right."""

import pytest

from trainer.data.tokenizers import get_tokenizer
from trainer.errors import ConfigError
from trainer.evaluate import recall
from trainer.evaluate.recall import RecallOptions, measure_recall
from trainer.evaluate.rows import ContinuationScore

BYTES = get_tokenizer("byte")
OPTIONS = RecallOptions(
    lengths=[200, 120], depths=[0.0, 0.5, 1.0], samples=3, key_digits=2, needle="KEY {key}. ", question="? ",
    answer="{key}", filling="abc ", rows=4,
)  # fmt: skip


def run(monkeypatch, answer):
    asked = []

    def score(model, pairs, chunk_tokens):
        texts = [(BYTES.decode(context), BYTES.decode(continuation)) for context, continuation in pairs]
        asked.extend(texts)
        return [ContinuationScore(-2.0 if answer(*text) else -8.0, answer(*text)) for text in texts]

    monkeypatch.setattr(recall, "score_continuations", score)
    counted = []
    return measure_recall(None, BYTES, OPTIONS, counted.append), asked, sum(counted)


def test_rows_have_the_asked_length_and_place(monkeypatch):
    table, asked, counted = run(monkeypatch, lambda context, answer: True)
    assert (table.lengths, table.depths) == ([120, 200], [0.0, 0.5, 1.0])
    assert len(asked) == 2 * 3 * 3
    assert counted == 9 * (120 + 200)
    places = set()
    for context, answer in asked:
        assert len(context) in (120, 200)
        assert context.endswith("? ")
        assert len(answer) == 2
        assert context.count(f"KEY {answer}. ") == 1
        places.add((len(context), context.index("KEY")))
    assert places == {(120, 0), (120, 55), (120, 110), (200, 0), (200, 95), (200, 190)}


def test_cells_are_shares_of_right_answers(monkeypatch):
    table, _, _ = run(monkeypatch, lambda context, answer: len(context) == 120 and context.index("KEY") > 0)
    assert table.right == [[0, 0], [pytest.approx(1), 0], [pytest.approx(1), 0]]
    assert table.log_probability == [[-8, -8], [-2, -8], [-2, -8]]
    assert table.rows()[2] == {"length": 120, "depth": 0.5, "samples": 3, "right": 1.0, "log_probability": -2.0}


def test_the_same_seed_asks_the_same(monkeypatch):
    first = run(monkeypatch, lambda context, answer: True)[1]
    assert run(monkeypatch, lambda context, answer: True)[1] == first


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lengths": [9]}, "--lengths: too short; found 9; must be at least 10"),
        ({"depths": [0.5, 1.5]}, "--depths: out of range; found 1.5"),
        ({"samples": 0}, "--samples"),
        ({"needle": "no key"}, "--needle: has no place for the key"),
        ({"filling": " "}, "--filling: is empty"),
    ],
)
def test_bad_options_are_refused_by_name(changes, words):
    import dataclasses

    with pytest.raises(ConfigError, match=words):
        measure_recall(None, BYTES, dataclasses.replace(OPTIONS, **changes))

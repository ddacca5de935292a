"""Requests of lm-evaluation-harness, answered without the harness."""

import builtins
import sys

import pytest
import torch
import torch.nn.functional as F

from tests.evaluate.small_models import letter_model
from trainer.data.tokenizers import get_tokenizer
from trainer.errors import ConfigError
from trainer.evaluate.documents import EvaluationOptions
from trainer.evaluate.harness import Scorer, run_tasks

BYTES = get_tokenizer("byte")
MODEL = letter_model()
OPTIONS = EvaluationOptions(ctx_len=16, rows=3)


@pytest.fixture(scope="module")
def scorer():
    return Scorer(MODEL, BYTES, OPTIONS)


def log_probability(context, continuation):
    ids = torch.tensor([[0, *BYTES.encode(context), *BYTES.encode(continuation)]])
    scores = F.log_softmax(MODEL.head(MODEL(ids[:, :-1])[0][0]), 1)
    return float(scores.gather(1, ids[0, 1:, None])[-len(BYTES.encode(continuation)) :].sum())


def test_loglikelihood_answers_in_the_order_of_the_requests(scorer):
    pairs = [("", "no context"), ("a long context " * 9, "end"), ("Q:", " yes"), ("Q: ", "yes"), ("Q:", " no é")]
    found = scorer.loglikelihood(pairs)
    for (context, continuation), (value, is_greedy) in zip(pairs, found, strict=True):
        # Spaces before a word belong to it.
        moved = context[len(context.rstrip()) :]
        assert value == pytest.approx(log_probability(context.rstrip(), moved + continuation), rel=1e-4)
        assert isinstance(is_greedy, bool)
    assert found[2] == pytest.approx(found[3])


def test_answers_to_one_question_are_in_their_order(scorer):
    pairs = [
        (f"Question {i % 3}:", f" {word}")
        for i, word in enumerate(["one", "two", "three", "four", "five", "six", "seven"])
    ]
    for (context, continuation), (value, _) in zip(pairs, scorer.loglikelihood(pairs), strict=True):
        assert value == pytest.approx(log_probability(context, continuation), rel=1e-4)


def test_loglikelihood_knows_what_greedy_decoding_writes(scorer):
    text = scorer.generate_until([("Q:", {"max_gen_toks": 3})])[0]
    assert scorer.loglikelihood([("Q:", text)])[0][1]
    assert not scorer.loglikelihood([("Q:", "~" + text)])[0][1]


def test_rolling_scores_every_token_of_long_texts(scorer):
    texts = ["short", "x" * 200 + "y"]
    for text, value in zip(texts, scorer.loglikelihood_rolling(texts), strict=True):
        assert value == pytest.approx(log_probability("", text), rel=1e-4)


def greedy_text(context, num):
    ids, written = [0, *BYTES.encode(context)], []
    for _ in range(num):
        token = int(MODEL.head(MODEL(torch.tensor([ids]))[0][0, -1]).argmax())
        if token == 0:
            break
        ids.append(token)
        written.append(token)
    return BYTES.decode(written)


def test_generate_until_is_greedy_decoding_of_each_text_alone(scorer):
    contexts = ["a", "some longer context", "b" * 50, "and"]
    found = scorer.generate_until([(context, {"max_gen_toks": 12}) for context in contexts])
    assert found == [greedy_text(context, 12) for context in contexts]


def test_generate_until_stops_before_a_stop_text(scorer):
    whole = scorer.generate_until([("a", {"max_gen_toks": 12})])[0]
    assert len(whole) > 4
    stop = whole[3:5]
    for until in (stop, [stop], ["not there", stop]):
        assert scorer.generate_until([("a", {"until": until, "max_gen_toks": 12})]) == [whole[: whole.index(stop)]]
    assert scorer.generate_until([("a", {"max_gen_toks": 0})]) == [""]


def test_sampling_settings_act(scorer):
    def written(**settings):
        return scorer.generate_until([("a", {"max_gen_toks": 20, **settings})])[0]

    assert written(do_sample=True, temperature=0.0) == written() == written(do_sample=False, temperature=5.0)
    assert written(do_sample=True, temperature=5.0) != written()
    assert written(do_sample=True, temperature=5.0, top_k=1) == written()


class MergingTokenizer:
    """`ab` is one token, so a border between `a` and `b` lies inside it."""

    end_of_document = 0

    def encode(self, text):
        parts = text.split("ab")
        ids = BYTES.encode(parts[0])
        for part in parts[1:]:
            ids += [271, *BYTES.encode(part)]
        return ids


def test_a_token_over_the_border_is_not_used():
    scorer = Scorer(MODEL, MergingTokenizer(), OPTIONS)
    apart = Scorer(MODEL, BYTES, OPTIONS).loglikelihood([("a", "b")])[0]
    assert scorer.loglikelihood([("a", "b")])[0] == pytest.approx(apart)


def test_without_the_harness_one_line_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("lm_eval"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.delitem(sys.modules, "lm_eval", raising=False)
    with pytest.raises(ConfigError, match="pip install lm_eval"):
        run_tasks(MODEL, BYTES, ["anything"], OPTIONS)

"""Choosing tokens: which may be drawn, how often, and what penalties do."""

import math

import pytest
import torch

from trainer.errors import ConfigError
from trainer.generate.sampling import SAMPLING_HELP, Sampler, Sampling, candidates, penalized

LOGITS = torch.tensor([0.1, 0.5, 0.05, 0.05, 0.3]).log() + 7


def settings(**changes):
    return Sampling(**({"top_p": 1.0} | changes))


def allowed(logits, **changes):
    probability, ids = candidates(logits, settings(**changes))
    assert probability.sum().item() == pytest.approx(1, abs=1e-5)
    return dict(zip(ids.tolist(), probability.tolist(), strict=True))


def test_temperature_zero_takes_the_largest():
    sampler = Sampler(settings(temperature=0.0))
    assert [sampler.pick(LOGITS) for _ in range(3)] == [1, 1, 1]
    assert sampler.pick(LOGITS.bfloat16()) == 1


def test_everything_may_be_drawn_without_limits():
    assert allowed(LOGITS) == pytest.approx({0: 0.1, 1: 0.5, 2: 0.05, 3: 0.05, 4: 0.3}, abs=1e-6)


@pytest.mark.parametrize(("top_k", "ids"), [(1, {1}), (2, {1, 4}), (3, {0, 1, 4}), (100, {0, 1, 2, 3, 4})])
def test_top_k(top_k, ids):
    assert set(allowed(LOGITS, top_k=top_k)) == ids


@pytest.mark.parametrize(
    ("top_p", "ids"),
    [
        (0.0, {1}),
        (0.49, {1}),
        (0.51, {1, 4}),
        (0.79, {1, 4}),
        (0.85, {0, 1, 4}),
        (0.97, {0, 1, 2, 3, 4}),
        (1.0, {0, 1, 2, 3, 4}),
    ],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, ids):
    assert set(allowed(LOGITS, top_p=top_p)) == ids


def test_top_p_over_a_flat_vocabulary():
    assert len(allowed(torch.zeros(5000), top_p=0.9)) == pytest.approx(4500, abs=2)


def test_top_p_and_top_k_together():
    assert set(allowed(LOGITS, top_p=0.85, top_k=2)) == {1, 4}
    assert set(allowed(LOGITS, top_p=0.51, top_k=4)) == {1, 4}


def test_temperature_acts_after_the_limits():
    squares = {1: 0.25, 4: 0.09}
    wanted = {token: square / sum(squares.values()) for token, square in squares.items()}
    assert allowed(LOGITS, top_p=0.7, temperature=0.5) == pytest.approx(wanted, abs=1e-6)
    assert set(allowed(LOGITS, top_p=0.7, temperature=100.0)) == {1, 4}


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e30])
def test_extreme_temperatures_are_finite(temperature):
    probability = list(allowed(LOGITS * 1e4, temperature=temperature).values())
    assert all(math.isfinite(value) for value in probability)


def test_draws_follow_the_probabilities():
    sampler, draws = Sampler(settings(), seed=1), 4000
    counts = torch.bincount(torch.tensor([sampler.pick(LOGITS) for _ in range(draws)]), minlength=5) / draws
    wanted = LOGITS.softmax(0)
    assert ((counts - wanted).abs() < 4 * (wanted * (1 - wanted) / draws).sqrt()).all()


def test_impossible_tokens_are_never_drawn():
    sampler = Sampler(settings(), seed=1)
    logits = torch.tensor([-200.0, 0.0, -200.0, 0.0, -200.0])
    assert {sampler.pick(logits) for _ in range(200)} == {1, 3}


def test_seeds():
    def draw(seed):
        sampler = Sampler(settings(), seed)
        return [sampler.pick(torch.zeros(1000)) for _ in range(20)]

    before = torch.get_rng_state()
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(None) != draw(None)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seed_out_of_range(seed):
    with pytest.raises(ConfigError, match="--seed: out of range"):
        Sampler(settings(), seed)


def test_penalties_by_formula():
    logits, counts = torch.tensor([2.0, -2.0, 1.0]), {0: 1, 1: 3}
    found = penalized(logits, counts, settings(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.1))
    torch.testing.assert_close(found, torch.tensor([2 / 2 - 0.5 - 0.1, -2 * 2 - 0.5 - 0.3, 1.0]))
    torch.testing.assert_close(logits, torch.tensor([2.0, -2.0, 1.0]))


@pytest.mark.parametrize(
    "changes", [{"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"repetition_penalty": 2.0}], ids=str
)
def test_penalties_count_what_was_drawn(changes):
    sampler = Sampler(settings(temperature=0.0, **changes))
    assert [sampler.pick(torch.tensor([1.5, 1.0, 0.9])) for _ in range(3)] == [0, 1, 2]


def test_frequency_penalty_grows():
    sampler = Sampler(settings(temperature=0.0, frequency_penalty=0.4))
    assert [sampler.pick(torch.tensor([1.0, 0.0])) for _ in range(5)] == [0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
    ],
)
def test_values_out_of_range(name, value):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: out of range; found .*; must be "):
        settings(**{name: value})


def test_every_setting_has_a_line_of_help():
    assert list(SAMPLING_HELP) == list(vars(Sampling()))

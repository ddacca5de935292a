from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.sampler import cubic_offset, epoch_permutation, magic_prime, official_offsets
from trainer.errors import DataError

OFFICIAL = json.loads((Path(__file__).parents[1] / "fixtures" / "official_order.json").read_text())


@pytest.mark.parametrize(
    ("num_tokens", "window", "prime"),
    [(1498226207, 512, 2926181), (332115325534, 4096, 81082817), (86, 8, 5), (4240933, 512, 8273), (24, 8, 2)],
)
def test_magic_prime_is_the_official_one(num_tokens, window, prime):
    assert magic_prime(num_tokens, window) == prime


def test_magic_prime_is_the_largest_below_the_limit():
    sieve = [n for n in range(2, 3000) if all(n % k for k in range(2, int(n**0.5) + 1))]
    for limit in range(2, 3000):
        assert magic_prime(limit + 1, 1) == max(p for p in sieve if p <= limit and p % 3 == 2)


@pytest.mark.parametrize("limit", [2**61 - 1, 3215031751, 3825123056546413051, 341550071728321])
def test_magic_prime_is_not_fooled_by_strong_pseudoprimes(limit):
    prime = magic_prime(limit + 1, 1)
    assert prime <= limit
    assert prime not in (3215031751, 3825123056546413051, 341550071728321)


def test_magic_prime_refuses_too_little_data():
    with pytest.raises(DataError, match=r"data\.batching: windows of 8 tokens.*23 tokens.*at least 24 tokens"):
        magic_prime(23, 8)


@pytest.mark.parametrize("data_set", ["minipile", "pile"])
def test_offsets_equal_the_official_walk(data_set):
    walk = OFFICIAL["walks"][data_set]
    for case in walk["cases"]:
        sample = case["epoch"] * 40320 + case["idx"] * case["world"] + case["rank"]
        assert sample + 1 == case["ii"]
        assert official_offsets(walk["magic_prime"], walk["ctx_len"], [sample]) == [case["offset"]]
    assert cubic_offset(walk["magic_prime"], 1) == walk["factor"]


def test_offsets_of_the_first_samples_of_minipile():
    first = official_offsets(2926181, 512, [0, 1, 2, 15])
    assert first == [925941248, 1414711296, 1029138944, 699326976]


@given(st.integers(3, 400))
def test_cubic_walk_visits_every_window_once(num_windows):
    prime = magic_prime(num_windows, 1)
    assert sorted(cubic_offset(prime, i) for i in range(1, prime + 1)) == list(range(prime))


@given(st.integers(0, 50), st.integers(0, 2**64), st.integers(0, 100))
def test_epoch_permutation_is_a_permutation(num, seed, epoch):
    order = epoch_permutation(num, seed, epoch)
    assert sorted(order.tolist()) == list(range(num))
    np.testing.assert_array_equal(order, epoch_permutation(num, seed, epoch))


def test_epoch_permutation_never_changes_between_versions():
    assert epoch_permutation(8, 3941088705, 0).tolist() == [1, 6, 2, 3, 7, 0, 5, 4]
    assert epoch_permutation(8, 3941088705, 1).tolist() == [0, 1, 2, 3, 5, 6, 7, 4]
    assert epoch_permutation(100, 1, 0).tolist() != epoch_permutation(100, 2, 0).tolist()

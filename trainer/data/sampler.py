"""Orders that are pure functions: the official cubic walk over windows, and seeded permutations.

Nothing here looks at a clock, at the number of workers or at a random generator with hidden state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from trainer.errors import DataError

__all__ = ["cubic_offset", "epoch_permutation", "keyed_permutation", "magic_prime", "official_offsets"]

# Miller-Rabin with these bases is exact below 3.3e24 (Sorenson and Webster, 2015).
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def _is_prime(number: int) -> bool:
    if number < 2:
        return False
    for prime in _WITNESSES:
        if number % prime == 0:
            return number == prime
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in _WITNESSES:
        power = pow(witness, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def magic_prime(num_tokens: int, window: int) -> int:
    """Largest prime p with p mod 3 = 2 that leaves room for p windows of `window` + 1 tokens.

    Args:
        num_tokens: length of the flat token stream.
        window: input tokens per sample (`ctx_len`).

    Raises:
        DataError: if there are fewer than 3 windows.

    Source: the official trainer's rule, p <= floor(num_tokens / window) - 1.
    """
    candidate = num_tokens // window - 1
    if candidate < 2:
        raise DataError(
            "data.batching",
            f"windows of {window} tokens need more data",
            found=f"{num_tokens} tokens",
            rule=f"at least {3 * window} tokens",
            fix="use more data, a smaller model.ctx_len, or data.batching: documents",
        )
    candidate -= (candidate - 2) % 3
    while not _is_prime(candidate):
        candidate -= 3
    return candidate


def cubic_offset(prime: int, index: int) -> int:
    """Window number, 0 .. prime - 1, of the `index`-th sample (counted from 1) of the official order.

    Exact at any size. p mod 3 = 2 makes cubing a bijection modulo p, so p samples in a row visit every
    window once.
    """
    factor = int(prime * ((math.sqrt(5) - 1) / 2))
    return factor * pow(index, 3, prime) % prime


def official_offsets(prime: int, window: int, samples: Iterable[int]) -> list[int]:
    """Token offsets of samples of the official order.

    Args:
        prime: see `magic_prime`.
        window: input tokens per sample.
        samples: numbers counted from 0 over the whole run and all ranks. The official epoch e, data
            loader index idx, rank r of W is sample e * 40320 + idx * W + r.
    """
    return [cubic_offset(prime, 1 + sample) * window for sample in samples]


def keyed_permutation(num: int, seed: int, *key: int) -> NDArray[np.int64]:
    """int64 [num]: a permutation of 0 .. num - 1 that depends on nothing but the arguments."""
    # Raw bits of a bit generator are the one thing numpy promises to keep between versions; the
    # permutation methods of its Generator are not.
    sequence = np.random.SeedSequence(seed % 2**64, spawn_key=key)
    return np.argsort(np.random.Philox(sequence).random_raw(num), kind="stable")


def epoch_permutation(num: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """int64 [num]: the order of `num` documents in an epoch, whatever the number of ranks."""
    return keyed_permutation(num, seed, epoch)

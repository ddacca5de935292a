"""Drawing the next token from logits: temperature, top-k, top-p, penalties for repetition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.errors import ConfigError

__all__ = ["SAMPLING_HELP", "Sampler", "Sampling", "candidates", "penalized"]

# Nearly every distribution has its top-p share in so many tokens; sorting the whole vocabulary costs far more.
_FIRST_LOOK = 1024
_MAX_SEED = 2**63


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. Penalties count the tokens that were generated, not those of the prompt.

    Raises:
        ConfigError: if a value is out of range.
    """

    temperature: float = 1.0
    """Divides the logits of the tokens that top_k and top_p leave; 0 = always the largest logit."""
    top_k: int = 0
    """Draw from so many most probable tokens; 0 = all."""
    top_p: float = 0.7
    """Draw from the fewest most probable tokens whose probabilities, at temperature 1, sum to this; 1 = all."""
    repetition_penalty: float = 1.0
    """A seen token's logit is divided by this if positive, else multiplied; 1 = off."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each seen token."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a seen token for every time that it was seen."""

    def __post_init__(self) -> None:
        rules = {
            "temperature": (0 <= self.temperature < float("inf"), "a number from 0"),
            "top_k": (self.top_k >= 0, "0 (all) or a number of tokens"),
            "top_p": (0 <= self.top_p <= 1, "between 0 and 1"),
            "repetition_penalty": (0 < self.repetition_penalty < float("inf"), "above 0 (1 = off)"),
            "presence_penalty": (abs(self.presence_penalty) < float("inf"), "a finite number"),
            "frequency_penalty": (abs(self.frequency_penalty) < float("inf"), "a finite number"),
        }
        for name, (is_legal, rule) in rules.items():
            if not is_legal:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(option, "out of range", found=getattr(self, name), rule=rule)


SAMPLING_HELP = {
    "temperature": "below 1 bolder choices are rarer; 0 takes the most probable token",
    "top_k": "draw from so many most probable tokens; 0 = all",
    "top_p": "draw from the most probable tokens that have this share",
    "repetition_penalty": "divides the logits of tokens already written; 1 = off",
    "presence_penalty": "taken off the logits of tokens already written",
    "frequency_penalty": "the same, for every time that they were written",
}
"""One line for each field of `Sampling`, for command lines."""


def penalized(logits_V: Tensor, counts: Mapping[int, int], settings: Sampling) -> Tensor:
    """Logits after the penalties.

    Args:
        logits_V: float32 [V].
        counts: how often each token was seen.
        settings: the three penalties.
    """
    is_off = (settings.repetition_penalty, settings.presence_penalty, settings.frequency_penalty) == (1.0, 0.0, 0.0)
    if is_off or not counts:
        return logits_V
    seen = torch.tensor(list(counts), device=logits_V.device)
    times = torch.tensor(list(counts.values()), dtype=logits_V.dtype, device=logits_V.device)
    values = logits_V[seen]
    values = torch.where(values > 0, values / settings.repetition_penalty, values * settings.repetition_penalty)
    values = values - settings.presence_penalty - settings.frequency_penalty * times
    return logits_V.index_copy(0, seen, values)


def candidates(logits_V: Tensor, settings: Sampling) -> tuple[Tensor, Tensor]:
    """The tokens that may be drawn, and their probabilities.

    top_p looks at the whole distribution at temperature 1, whatever top_k leaves; the temperature then acts
    on the tokens that are left, as in the official demos.

    Args:
        logits_V: finite float32 [V].
        settings: temperature above 0, top_k, top_p.

    Returns:
        Probabilities float32 [K], which sum to 1, and ids int64 [K], K >= 1.
    """
    vocab_size = len(logits_V)
    if settings.top_k == 0 and settings.top_p == 1:
        ids = torch.arange(vocab_size, device=logits_V.device)
    else:
        probability_V = torch.softmax(logits_V, 0)
        count = min(settings.top_k or _FIRST_LOOK, vocab_size)
        largest, ids = probability_V.topk(count)
        if settings.top_k == 0 and largest.sum() < settings.top_p:
            largest, ids = probability_V.topk(vocab_size)
        before = largest.cumsum(0) - largest
        is_kept = before < settings.top_p
        is_kept[0] = True
        ids = ids[is_kept]
    values = logits_V[ids]
    return torch.softmax((values - values.max()) / settings.temperature, 0), ids


class Sampler:
    """Chooses tokens one after another.

    Args:
        settings: how.
        seed: the same seed gives the same choices on every device; None = other ones each time.

    Raises:
        ConfigError: if the seed is out of range.
    """

    def __init__(self, settings: Sampling, seed: int | None = None) -> None:
        self.settings = settings
        self._counts: Counter[int] = Counter()
        self._random = torch.Generator()
        if seed is None:
            self._random.seed()
        elif 0 <= seed < _MAX_SEED:
            self._random.manual_seed(seed)
        else:
            raise ConfigError("--seed", "out of range", found=seed, rule="from 0 to 2^63 - 1")

    def pick(self, logits_V: Tensor) -> int:
        """The next token for finite logits [V] of any dtype and device."""
        logits_V = penalized(logits_V.float(), self._counts, self.settings)
        if self.settings.temperature == 0:
            token = int(logits_V.argmax())
        else:
            probability, ids = candidates(logits_V, self.settings)
            upto = probability.double().cumsum(0)
            point = torch.rand((), generator=self._random, dtype=torch.float64).to(upto.device) * upto[-1]
            token = int(ids[torch.searchsorted(upto, point, right=True).clamp(max=len(ids) - 1)])
        self._counts[token] += 1
        return token

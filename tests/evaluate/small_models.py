"""Small models for tests of the evaluation."""

import torch

from trainer.model.init import init_weights
from trainer.model.naming import ModelShape
from trainer.model.rwkv7 import RWKV7

BYTE_SHAPE = ModelShape.official(2, 32, 272, head_size=16)


def lively_weights(shape, seed=7):
    """Weights without the official zeros, under which every token has the same loss."""
    generator = torch.Generator().manual_seed(seed)
    return {n: w + 0.3 * torch.randn(w.shape, generator=generator) for n, w in init_weights(shape, 1).items()}


def letter_model():
    """Writes small letters: the head's rows of other bytes are far from what comes out."""
    weights = lively_weights(BYTE_SHAPE)
    weights["ln_out.bias"] = torch.ones_like(weights["ln_out.bias"])
    is_letter = torch.zeros(BYTE_SHAPE.vocab_size, dtype=torch.bool)
    is_letter[[ord(letter) + 1 for letter in "abcdefghijklmnopqrstuvwxyz "]] = True
    weights["head.weight"][~is_letter] -= 1.0
    model = RWKV7(BYTE_SHAPE, "chunked")
    model.load_state_dict(weights)
    return model.requires_grad_(False)


def lively_model(shape=BYTE_SHAPE):
    model = RWKV7(shape, "chunked")
    model.load_state_dict(lively_weights(shape))
    return model.requires_grad_(False)

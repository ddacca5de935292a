"""The PyPI package `rwkv`, as an independent reader: it loads our files, and agrees on logits and on the state."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer.checkpoint.export import save_weights
from trainer.checkpoint.read import read_weights
from trainer.model.init import init_weights
from trainer.model.naming import ModelShape
from trainer.model.rwkv7 import RWKV7
from trainer.model.state import ModelState

TINY = Path(__file__).parents[1] / "fixtures" / "vectors" / "tiny_L2_D128_V256.pth"
SHAPES = {"two_blocks": ModelShape.official(2, 128, 256), "one_block": ModelShape.official(1, 64, 300)}
TOKENS, CUT = 200, 77
# The package reads its switches when it is imported, so it gets a process of its own.
PROGRAM = """
import sys, torch
from rwkv.model import RWKV

folder, names = sys.argv[1], sys.argv[2:]
for name in names:
    case = torch.load(f"{folder}/{name}_case.pt")
    model = RWKV(model=f"{folder}/{name}", strategy="cpu fp32")
    whole, state = model.forward(case["ids"], None, full_output=True)
    rest, _ = model.forward(case["ids"][case["cut"]:], case["state"], full_output=True)
    torch.save({"logits": whole, "state": state, "rest": rest}, f"{folder}/{name}_result.pt")
"""


def weights_of(name: str) -> dict[str, Tensor]:
    if name == "two_blocks":
        return read_weights(TINY)
    generator = torch.Generator().manual_seed(0)
    fresh = init_weights(SHAPES[name], seed=0)
    # Official initial weights are zero in places; move everything.
    return {key: value + 0.1 * torch.randn(value.shape, generator=generator) for key, value in fresh.items()}


def package_state(state: ModelState) -> list[Tensor]:
    """The package's list: per block the shift of time mixing, wkv [head, value, key], the shift of channel mixing."""
    return [x[0] for layer in state for x in (layer.shift_att, layer.wkv, layer.shift_ffn)]


def run_ours(path: Path, ids: list[int]) -> tuple[Tensor, ModelState, ModelState]:
    """Logits, the state after all tokens, and the state after the first CUT tokens."""
    model = RWKV7(SHAPES[path.stem])
    model.load_state_dict(read_weights(path))
    model.float()
    with torch.no_grad():
        hidden, state = model(torch.tensor(ids)[None])
        _, early_state = model(torch.tensor(ids[:CUT])[None])
        return model.head(hidden)[0], state, early_state


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Per model: our logits, state and early state, and what the package made of them."""
    folder, ours = tmp_path_factory.mktemp("rwkv"), {}
    for name, shape in SHAPES.items():
        path = folder / f"{name}.pth"
        save_weights(weights_of(name), path)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, shape.vocab_size, (TOKENS,), generator=generator).tolist()
        ours[name] = run_ours(path, ids)
        torch.save({"ids": ids, "cut": CUT, "state": package_state(ours[name][2])}, folder / f"{name}_case.pt")
    switches = {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    command = [sys.executable, "-c", PROGRAM, str(folder), *SHAPES]
    done = subprocess.run(command, env=os.environ | switches, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return {name: (ours[name], torch.load(folder / f"{name}_result.pt")) for name in SHAPES}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_agree(results, name):
    (logits, _, _), theirs = results[name]
    assert logits.std() > 0.1
    torch.testing.assert_close(logits, theirs["logits"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_state_agrees(results, name):
    (_, state, _), theirs = results[name]
    for ours, wanted in zip(package_state(state), theirs["state"], strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-5)
    wkv = theirs["state"][1]
    assert (wkv - wkv.mT).abs().max() > 0.01


@pytest.mark.parametrize("name", SHAPES)
def test_package_continues_from_our_state(results, name):
    (logits, _, _), theirs = results[name]
    torch.testing.assert_close(theirs["rest"], logits[CUT:], rtol=0, atol=2e-5)

"""Weights out of DeepSpeed's ZeRO shards, written by DeepSpeed itself on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trainer.checkpoint.atomic import atomic_folder
from trainer.checkpoint.read import read_weights

ROOT = Path(__file__).parents[2]

# A module tree with the official names below `model.`, stepped once under ZeRO and saved as Lightning does.
WRITER = """
import sys
import deepspeed, deepspeed.ops, torch
from safetensors.torch import save_file
from torch import nn
from trainer.model.init import init_weights
from trainer.model.naming import ModelShape

class Tree(nn.Module):
    def __init__(self, weights):
        super().__init__()
        for name, tensor in weights.items():
            *path, leaf = ("model." + name).split(".")
            node = self
            for part in path:
                if part not in node._modules:
                    node.add_module(part, nn.Module())
                node = node._modules[part]
            node.register_parameter(leaf, nn.Parameter(tensor))

    def forward(self, x):
        return sum((parameter.float() * x).sum() for parameter in self.parameters())

stage, folder, expected = int(sys.argv[1]), sys.argv[2], sys.argv[3]
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo", rank=0, world_size=1, auto_mpi_discovery=False)
tree = Tree(init_weights(ModelShape.official(2, 64, 128), seed=1))
low = {name: parameter.detach().bfloat16() for name, parameter in tree.named_parameters()}
optimizer = torch.optim.AdamW(tree.parameters(), lr=1e-3)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": stage},
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
engine, _, _, _ = deepspeed.initialize(model=tree, optimizer=optimizer, config=config)
if stage < 3:
    engine.backward(engine(torch.ones(())))
    engine.step()
    low = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
save_file(low, expected)
engine.save_checkpoint(folder, tag="checkpoint")
"""


def run_python(arguments):
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run([sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.promise(21)
def test_export_merges_the_shards(tmp_path, stage):
    with atomic_folder(tmp_path / "step-1", {"step": 1}) as temp:
        run_python(["-c", WRITER, stage, temp, tmp_path / "expected.safetensors"])
    out = tmp_path / "x.pth"
    printed = run_python([ROOT / "export_checkpoint.py", tmp_path / "step-1", out, "fp32"])
    assert printed.startswith(str(out))
    weights = read_weights(out)
    expected = load_file(tmp_path / "expected.safetensors")
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor.bfloat16(), expected[f"model.{name}"]), name


@pytest.mark.slow
def test_foreign_shards_need_trust(tmp_path):
    folder = tmp_path / "x.ckpt"
    run_python(["-c", WRITER, 2, folder, tmp_path / "expected.safetensors"])
    run_python([ROOT / "export_checkpoint.py", folder, tmp_path / "x.pth", "--trust"])
    assert len(read_weights(tmp_path / "x.pth")) == 72

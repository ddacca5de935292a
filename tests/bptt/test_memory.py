"""Exact gradients keep one state per chunk border, and nothing else of a chunk."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.recall import ModuleEngine, add_gradients  # noqa: E402
from trainer.bptt.step import ChunkInput  # noqa: E402
from trainer.config.schema import ModelConfig  # noqa: E402
from trainer.model.init import init_weights  # noqa: E402
from trainer.model.naming import ModelShape  # noqa: E402
from trainer.model.rwkv7 import RWKV7  # noqa: E402
from trainer.model.state import state_tensors  # noqa: E402
from trainer.train.optim import MasterAdamW, clip_by_global_norm, parameter_groups  # noqa: E402
from trainer.types import Batch  # noqa: E402

MIB = 1 << 20
CTX_LEN = 4096
SHAPE = ModelShape.official(3, 64, 64)


def make_model(shape: ModelShape) -> RWKV7:
    model = RWKV7(shape, "chunked")
    model.load_state_dict(init_weights(shape, seed=0))
    return model


def document(tokens: int) -> Batch:
    ids = torch.randint(64, (1, tokens), generator=torch.Generator().manual_seed(0))
    weight, reset = torch.ones(1, tokens), torch.zeros(1, tokens, dtype=torch.bool)
    return Batch(ids, ids.roll(-1, 1), weight, reset, (tokens,))


class Holder:
    """Lives exactly as long as the graph that saved the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedTensors:
    """Tensors that live graphs hold for their backward."""

    def __init__(self) -> None:
        self.live: weakref.WeakSet = weakref.WeakSet()

    def pack(self, tensor: Tensor) -> Holder:
        holder = Holder(tensor)
        self.live.add(holder)
        return holder

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda holder: holder.tensor)

    def num_bytes(self) -> int:
        """Bytes of the distinct storages."""
        storages = [holder.tensor.untyped_storage() for holder in self.live]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class CountingEngine(ModuleEngine):
    """Notes what graphs hold when a chunk begins, before its backward and after it."""

    def __init__(self, model: RWKV7, saved: SavedTensors) -> None:
        super().__init__(model)
        self.saved = saved
        self.before_chunk: list[tuple[int, int]] = []
        self.before_backward: list[int] = []
        self.after_backward: list[int] = []

    def forward(self, chunk: ChunkInput, *, with_loss: bool, is_last: bool):
        with_graph = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and x.grad_fn is not None]
        self.before_chunk.append((len(self.saved.live), len(with_graph)))
        return super().forward(chunk, with_loss=with_loss, is_last=is_last)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self.before_backward.append(len(self.saved.live))
        super().backward(loss, is_last=is_last)
        self.after_backward.append(len(self.saved.live))


class KeepingEngine(ModuleEngine):
    """What must not happen: the graph of each chunk stays alive."""

    def __init__(self, model: RWKV7) -> None:
        super().__init__(model, slice_rows=512)
        self.graphs: list[Tensor] = []

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        loss.backward(retain_graph=True)
        self.graphs.append(loss)


@pytest.mark.parametrize("window", [1, 3, "full"])
@pytest.mark.parametrize("checkpoint_blocks", [False, True])
def test_live_graph_is_that_of_one_chunk(window, checkpoint_blocks):
    model = make_model(ModelShape.official(2, 32, 64, head_size=16))
    model.checkpoint_blocks = checkpoint_blocks
    gc.collect()
    saved = SavedTensors()
    engine = CountingEngine(model, saved)
    with saved.hooks():
        add_gradients(engine, document(160), window, 16)
    assert len(engine.before_backward) == 10
    assert set(engine.before_chunk) == {(0, 0)}
    assert set(engine.after_backward) == {0}
    assert len(set(engine.before_backward)) == 1 <= min(engine.before_backward)


@pytest.mark.parametrize("with_graph", [False, True])
def test_state_does_not_hold_its_chunk(with_graph):
    model = make_model(ModelShape.official(2, 32, 64, head_size=16))
    with torch.set_grad_enabled(with_graph):
        _, state = model(document(64).ids_BT)
    for tensor in state_tensors(state):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def measure(window, tokens: int, keep_graphs: bool) -> dict[str, float]:
    """Peak resident memory in MiB after each of three optimizer steps: two chunks, then twice `tokens`."""
    torch.set_num_threads(1)
    model = make_model(SHAPE)
    engine = KeepingEngine(model) if keep_graphs else ModuleEngine(model, slice_rows=512)
    settings = ModelConfig()
    optimizer = MasterAdamW(parameter_groups(model.named_parameters(), settings), settings)
    peaks = []
    for batch in [document(n) for n in (2 * CTX_LEN, tokens, tokens)]:
        add_gradients(engine, batch, window, CTX_LEN)
        clip_by_global_norm(list(optimizer.gradients().values()), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if keep_graphs:
            engine.graphs.clear()
        peaks.append(peak_mib())
    return {"first": peaks[0], "second": peaks[1], "third": peaks[2]}


def peak_mib() -> float:
    """Highest resident memory of this process so far; unlike `ru_maxrss`, not that of the one that started it."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def peaks_of_a_process(window: object, tokens: int, keep_graphs: bool = False) -> dict[str, float]:
    # glibc keeps freed blocks below a threshold that grows with use, so that resident memory would be that of
    # its free lists. A fixed threshold hands every tensor of 64 KiB and more back at once.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, __file__, str(window), str(tokens), str(int(keep_graphs))]
    done = subprocess.run(words, env=env, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def activation_mib() -> float:
    """What the graph of one chunk holds."""
    saved, model = SavedTensors(), make_model(SHAPE)
    with saved.hooks():
        batch = document(CTX_LEN)
        chunk = ChunkInput(batch.ids_BT, batch.targets_BT, batch.weight_BT, None, model.zero_state(1))
        result = ModuleEngine(model).forward(chunk, with_loss=True, is_last=True)
        size = saved.num_bytes() / MIB
    assert result[0] is not None
    return size


def allowed_growth_mib(tokens: int) -> float:
    state_bytes = sum(x.numel() * x.element_size() for x in state_tensors(make_model(SHAPE).zero_state(1)))
    return 1.2 * (tokens // CTX_LEN - 1) * state_bytes / MIB + 8


@pytest.mark.slow
@pytest.mark.fault(47)
@pytest.mark.promise(13)
def test_memory_grows_by_the_boundary_states_alone():
    tokens, one_chunk = 65536, activation_mib()
    allowed = allowed_growth_mib(tokens)
    assert one_chunk > 100 > 5 * allowed
    peaks = peaks_of_a_process("full", tokens)
    assert max(peaks["second"], peaks["third"]) - peaks["first"] <= allowed


@pytest.mark.slow
def test_kept_activations_would_be_noticed():
    tokens = 4 * CTX_LEN
    peaks = peaks_of_a_process("full", tokens, keep_graphs=True)
    assert peaks["second"] - peaks["first"] > 100 > 5 * allowed_growth_mib(tokens)


if __name__ == "__main__":
    window_word, tokens_word, keep_word = sys.argv[1:]
    own_window = window_word if window_word == "full" else int(window_word)
    print(json.dumps(measure(own_window, int(tokens_word), bool(int(keep_word)))))

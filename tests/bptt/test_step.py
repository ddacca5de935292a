"""Gradients of a step do not depend on how its tokens are cut into chunks, micro-batches or rows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trainer.bptt.plan import StepPlan, boundary_stride, plan_chunks, plan_windows
from trainer.bptt.step import ChunkInput, EagerEngine, StepOptions, evaluate_step, run_step
from trainer.model.init import init_weights
from trainer.model.naming import ModelShape
from trainer.model.rwkv7 import RWKV7
from trainer.model.state import ModelState, detach_state, state_tensors
from trainer.ops.loss import GroupSums, linear_cross_entropy
from trainer.types import Batch

SHAPE = ModelShape.official(3, 32, 48, head_size=16)


class PlainEngine(EagerEngine):
    """One process, no strategy: the module itself."""

    def __init__(self, model: RWKV7, l2wrap: float = 1e-4) -> None:
        self.model, self.l2wrap = model, l2wrap
        self.last_flags: list[bool] = []
        self.live_graphs: list[int] = []

    def zero_state(self, rows: int) -> ModelState:
        return self.model.zero_state(rows)

    def forward(self, chunk: ChunkInput, *, with_loss: bool, is_last: bool) -> tuple[Tensor | None, ModelState]:
        hidden, state = self.model(chunk.ids_BT, chunk.state, chunk.reset_BT)
        if not with_loss:
            return None, state
        groups = None
        if chunk.group_BT is not None and chunk.group_sums_2G is not None:
            groups = GroupSums(chunk.group_BT.flatten(), chunk.group_sums_2G)
        loss = linear_cross_entropy(
            hidden.flatten(0, 1),
            self.model.head.weight,
            chunk.targets_BT.flatten(),
            chunk.weight_BT.flatten(),
            self.l2wrap,
            groups=groups,
        )
        return loss, state

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self.last_flags.append(is_last)
        loss.backward()


@pytest.fixture
def model() -> RWKV7:
    model = RWKV7(SHAPE, "chunked").double()
    weights = init_weights(SHAPE, seed=1)
    generator = torch.Generator().manual_seed(2)
    # The official zeros would hide missing gradients.
    model.load_state_dict(
        {
            k: v.double() + 0.1 * torch.randn(v.shape, generator=generator, dtype=torch.float64)
            for k, v in weights.items()
        }
    )
    return model


def make_batch(lengths: list[int], seed: int = 0, resets: bool = False, lanes: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.int64)
    targets, weight, reset = (
        ids.clone(),
        torch.zeros(len(lengths), longest),
        torch.zeros(len(lengths), longest, dtype=torch.bool),
    )
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(0, 48, (length,), generator=generator)
        targets[row, :length] = torch.randint(0, 48, (length,), generator=generator)
        weight[row, :length] = (torch.rand(length, generator=generator) < 0.8).float()
        reset[row, 0] = not lanes
        if resets:
            reset[row, :length] |= torch.rand(length, generator=generator) < 0.05
    return Batch(ids, targets, weight, reset, tuple(lengths), tuple(range(len(lengths))) if lanes else None)


def options(**changes) -> StepOptions:
    base = StepOptions(
        ctx_len=16, window="full", learning_range=-1, host_memory_bytes=1 << 30, num_micro=4, micro_rows=3
    )
    return replace(base, **changes)


def gradients(model: RWKV7, batches: list[Batch], opts: StepOptions, states=None, engine: PlainEngine | None = None):
    model.zero_grad(set_to_none=True)
    engine = engine or PlainEngine(model)
    result = run_step(
        engine, batches, states or [None] * len(batches), opts,
        device=torch.device("cpu"), world_size=1, gather=lambda numbers: [numbers],
    )  # fmt: skip
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return float(sum(result.losses)), grads, result


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name in a:
        error = (a[name] - b[name]).norm() / b[name].norm().clamp_min(1e-300)
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("ctx_len", [16, 32, 48])
@pytest.mark.parametrize("resets", [False, True])
def test_full_window_equals_one_chunk(model, ctx_len, resets):
    batch = make_batch([150, 97, 16], resets=resets)
    loss_one, one, _ = gradients(model, [batch], options(ctx_len=160))
    loss_cut, cut, _ = gradients(model, [batch], options(ctx_len=ctx_len))
    assert loss_cut == pytest.approx(loss_one, rel=1e-12)
    assert_same(cut, one)


@pytest.mark.parametrize("kept", [1, 3, 4, 100])
def test_thinned_boundaries_give_the_same_gradient(model, kept):
    batch = make_batch([200])
    state_bytes = sum(x.numel() * x.element_size() for x in state_tensors(model.zero_state(3)))
    _, expected, _ = gradients(model, [batch], options())
    _, thinned, _ = gradients(model, [batch], options(host_memory_bytes=kept * state_bytes))
    assert_same(thinned, expected, 1e-15)


def hand_detached(model: RWKV7, batch: Batch, ctx_len: int, window: int) -> dict[str, Tensor]:
    """One graph over the document, cut by `detach` where a window ends."""
    model.zero_grad(set_to_none=True)
    state, total = model.zero_state(batch.ids_BT.shape[0]), torch.zeros((), dtype=torch.float64)
    for number, start in enumerate(range(0, batch.ids_BT.shape[1], ctx_len)):
        part = slice(start, start + ctx_len)
        if number % window == 0:
            state = detach_state(state)
        hidden, state = model(batch.ids_BT[:, part], state, batch.reset_BT[:, part])
        weight = batch.weight_BT[:, part].flatten() / batch.weight_BT.sum()
        total = total + linear_cross_entropy(
            hidden.flatten(0, 1), model.head.weight, batch.targets_BT[:, part].flatten(), weight
        )
    total.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("window", [1, 2, 3])
def test_window_equals_hand_detached_graph(model, window):
    batch = make_batch([112, 112])
    _, grads, _ = gradients(model, [batch], options(window=window))
    assert_same(grads, hand_detached(model, batch, 16, window))


def test_truncation_changes_the_gradient(model):
    batch = make_batch([112, 112])
    _, full, _ = gradients(model, [batch], options())
    _, cut, _ = gradients(model, [batch], options(window=1))
    assert any((full[n] - cut[n]).norm() / full[n].norm() > 1e-3 for n in full)


def test_accumulation_and_row_order_do_not_matter(model):
    rows = [make_batch([n], seed=n) for n in (90, 70, 33, 17)]

    def join(parts: list[Batch]) -> Batch:
        longest = max(p.ids_BT.shape[1] for p in parts)
        pad = [[torch.nn.functional.pad(x, (0, longest - x.shape[1])) for x in p[:4]] for p in parts]
        return Batch(*(torch.cat(x) for x in zip(*pad, strict=True)), tuple(p.lengths[0] for p in parts))

    _, together, _ = gradients(model, [join(rows)], options())
    _, apart, _ = gradients(model, rows, options())
    _, mixed, _ = gradients(model, [join([rows[1], rows[2]]), join([rows[0], rows[3]])], options(ctx_len=32))
    assert_same(apart, together)
    assert_same(mixed, together)


def test_stream_state_is_carried_and_detached(model):
    whole = make_batch([128, 128], resets=True, lanes=True)
    parts = [whole._replace(**{f: getattr(whole, f)[:, s] for f in ("ids_BT", "targets_BT", "weight_BT", "reset_BT")}, lengths=(64, 64))
             for s in (slice(0, 64), slice(64, 128))]  # fmt: skip
    _, _, first = gradients(model, [parts[0]], options())
    _, _, second = gradients(model, [parts[1]], options(), states=first.states)
    _, _, both = gradients(model, [whole], options())
    for got, expected in zip(state_tensors(second.states[0]), state_tensors(both.states[0]), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
        assert not got.requires_grad


@pytest.mark.parametrize("learning_range", [1, 2])
def test_learning_range_trains_only_the_last_chunks(model, learning_range):
    batch = make_batch([80, 40])
    _, grads, result = gradients(model, [batch], options(window=1, learning_range=learning_range))
    weight = batch.weight_BT.clone()
    for row, length in enumerate(batch.lengths):
        weight[row, : (-(-length // 16) - learning_range) * 16] = 0
    _, expected, _ = gradients(model, [batch._replace(weight_BT=weight)], options(window=1))
    assert_same(grads, expected)
    assert result.total_weight == weight.sum()


@pytest.mark.fault(44)
def test_masked_step_is_finite_and_zero(model):
    batch = make_batch([40])
    loss, grads, _ = gradients(model, [batch._replace(weight_BT=torch.zeros_like(batch.weight_BT))], options())
    assert loss == 0
    assert all(not g.any() for g in grads.values())


@pytest.mark.parametrize("window", [1, 2, "full"])
def test_leading_untrained_chunks_change_nothing(model, window):
    """Where gradients stop at each chunk they have no backward; a window needs them."""
    batch = make_batch([100, 60])
    weight = batch.weight_BT.clone()
    weight[:, :40] = 0
    masked = batch._replace(weight_BT=weight)
    engine = PlainEngine(model)
    _, found, _ = gradients(model, [masked], options(window=window), engine=engine)
    assert len(engine.last_flags) == (5 if window == 1 else 7)
    assert engine.last_flags[-1]
    # A first token that counts next to nothing makes all chunks train.
    weight = weight.clone()
    weight[0, 0] = 1e-30
    _, expected, _ = gradients(model, [batch._replace(weight_BT=weight)], options(window=window))
    assert_same(found, expected)


def evaluated(model: RWKV7, batch: Batch, states: tuple = ()) -> tuple[Tensor, list[ModelState]]:
    sums = torch.zeros(2, 3, dtype=torch.float64)
    groups = torch.arange(batch.ids_BT.numel(), dtype=torch.int32).view(batch.ids_BT.shape) % 3
    after = evaluate_step(
        PlainEngine(model), [batch._replace(group_BT=groups)], options(ctx_len=32), device=torch.device("cpu"),
        gather=lambda numbers: [numbers], group_sums_2G=sums, states=states,
    )  # fmt: skip
    return sums, after


def test_evaluation_is_the_loss_of_training(model):
    batch = make_batch([90, 40])
    loss, _, _ = gradients(model, [batch], options())
    (total, weight), _ = evaluated(model, batch)
    assert weight.sum() == batch.weight_BT.sum()
    assert float(total.sum() / weight.sum()) == pytest.approx(loss, rel=1e-6)


def test_evaluation_goes_on_from_a_state(model):
    batch = make_batch([96, 64])
    whole, _ = evaluated(model, batch)
    first = Batch(*(x[:, :64] for x in batch[:4]), (64, 64))
    rest = Batch(*(x[:1, 64:] for x in batch[:4]), (32,))
    begin, states = evaluated(model, first)
    end, _ = evaluated(model, rest, tuple(states))
    torch.testing.assert_close((begin + end).sum(1), whole.sum(1), rtol=1e-12, atol=0)
    alone, _ = evaluated(model, rest)
    assert abs(alone[0].sum() - end[0].sum()) > 1e-3


def test_only_the_last_backward_ends_the_step(model):
    engine = PlainEngine(model)
    gradients(model, [make_batch([50]), make_batch([70, 20])], options(), engine=engine)
    assert engine.last_flags == [False] * (4 + 5 - 1) + [True]


@pytest.mark.fault(48)
def test_ranks_agree_on_the_plan():
    lengths = [[[100, 30]], [[10], [5]]]
    messages: list[list[float]] = []

    def gather_with(rank: int):
        return lambda numbers: messages[:rank] + [numbers] + messages[rank + 1 :]

    def plan(rank: int) -> StepPlan:
        return StepPlan.agree(
            lengths[rank], 7.0, ctx_len=16, window=2, learning_range=-1, num_micro=2, gather=gather_with(rank)
        )

    def record(numbers: list[float]) -> list[list[float]]:
        messages.append(numbers)
        return [numbers]

    for rank in range(2):
        StepPlan.agree(lengths[rank], 7.0, ctx_len=16, window=2, learning_range=-1, num_micro=2, gather=record)
    first, second = plan(0), plan(1)
    assert first.total_weight == second.total_weight == 14
    assert [len(m.chunks) for m in first.micro] == [len(m.chunks) for m in second.micro] == [7, 1]
    assert [m.windows for m in first.micro] == [m.windows for m in second.micro]
    assert [c.rows for c in first.micro[0].chunks] == [2, 2, 1, 1, 1, 1, 1]
    assert [c.rows for c in second.micro[0].chunks] == [1, 0, 0, 0, 0, 0, 0]


def test_plan_covers_every_token_once():
    for lengths in ([1], [16], [17], [100, 99, 16, 1], [64, 64]):
        seen = [0] * len(lengths)
        for chunk in plan_chunks(lengths, 16):
            for row in range(chunk.rows):
                seen[row] += max(0, min(chunk.stop, lengths[row]) - chunk.start)
        assert seen == lengths


def test_windows_and_strides():
    assert plan_windows(1, 6, 2) == (range(1, 3), range(3, 5), range(5, 6))
    assert plan_windows(0, 6, "full") == (range(0, 6),)
    assert boundary_stride(255, 1000) == 1
    for boundaries, limit in ((255, 128), (255, 32), (1000, 70)):
        stride = boundary_stride(boundaries, limit)
        assert -(-boundaries // stride) + stride - 1 <= limit
    assert boundary_stride(255, 1) == 16


def test_the_share_of_chunks_that_wait_is_that_of_all_ranks():
    """Rank 0 has 4 chunks and 1, rank 1 has 1 and none: of 4 x 2 + 1 x 2 chunks 6 are real."""
    own, other = [0.0, 4, 0, 1, 0], [0.0, 1, 0, 0, math.inf]
    plan = StepPlan.agree(
        [(60, 16), (9,)], 0.0, ctx_len=16, window=1, learning_range=-1, num_micro=2, gather=lambda _: [own, other]
    )
    assert plan.waiting_share == pytest.approx(0.4)

"""Loss by position against its definition, and memory that does not grow with a document."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.evaluate.small_models import lively_model
from trainer.data.store import FlatStore
from trainer.errors import ConfigError, DataError
from trainer.evaluate.documents import EvaluationOptions, evaluate_documents
from trainer.model.naming import ModelShape

SHAPE = ModelShape.official(2, 32, 48, head_size=16)
SIZES = [700, 2, 33, 1, 300, 34, 0, 5]


def make_store(sizes=SIZES, *, masked=False, sources=0):
    random = np.random.default_rng(0)
    tokens = random.integers(0, 48, sum(sizes)).astype(np.uint16)
    masks = [(random.random(sum(sizes)) < 0.5).astype(np.uint8)] if masked else None
    store = FlatStore("memory", [tokens], np.array(sizes), masks)
    if sources:
        store.source_ids = (np.arange(len(sizes)) % sources).astype(np.int32)
    return store


def expected(model, store):
    """Of each target: source, tokens before it, weight and loss."""
    for document, size in enumerate(store.sizes.tolist()):
        if size < 2:
            continue
        ids = torch.from_numpy(store.read(document, 0, size).astype(np.int64))
        mask = store.loss_mask(document, 1, size)
        loss = F.cross_entropy(model.head(model(ids[None, :-1])[0][0]), ids[1:], reduction="none")
        for index, value in enumerate(loss.tolist()):
            source = 0 if store.source_ids is None else int(store.source_ids[document])
            yield source, index + 1, 1.0 if mask is None else float(mask[index]), value


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_losses_are_those_of_each_document_alone(masked, rows):
    # Parts of 16 x 16 tokens: two documents come in several.
    model, store = lively_model(SHAPE), make_store(masked=masked, sources=2)
    table = evaluate_documents(model, store, EvaluationOptions(ctx_len=16, rows=rows), names=["a", "b"])
    every = list(expected(model, store))
    total, weight = sum(w * v for *_, w, v in every), sum(w for *_, w, _ in every)
    assert table.tokens == weight
    assert table.loss == pytest.approx(total / weight, rel=1e-5)
    for number, name in enumerate("ab"):
        mine = [(w, v) for s, _, w, v in every if s == number]
        assert table.by_source()[name] == pytest.approx(sum(w * v for w, v in mine) / sum(w for w, _ in mine), rel=1e-5)
    places = table.by_position()
    assert [place.first for place in places] == [1, 16, 32, 64, 128, 256, 512]
    assert [place.last for place in places] == [15, 31, 63, 127, 255, 511, 1023]
    for place in places:
        mine = [(w, v) for _, n, w, v in every if place.first <= n <= place.last]
        assert place.tokens == sum(w for w, _ in mine)
        assert place.loss == pytest.approx(sum(w * v for w, v in mine) / place.tokens, rel=1e-5)


def test_chunk_length_and_rows_change_nothing():
    model, store = lively_model(SHAPE), make_store()
    whole = evaluate_documents(model, store, EvaluationOptions(ctx_len=1024, rows=8)).sums_2SP
    for options in (EvaluationOptions(ctx_len=16, rows=2), EvaluationOptions(ctx_len=48, rows=1, loss_chunk_rows=10)):
        np.testing.assert_allclose(evaluate_documents(model, store, options).sums_2SP, whole, rtol=1e-5)


@pytest.mark.parametrize("context", [1, 16, 100, 256, 300])
def test_limited_context_is_that_of_pieces(context):
    """As if each document were cut into pieces, but by the positions in whole documents."""
    model, store = lively_model(SHAPE), make_store()
    sums = {}
    for document, size in enumerate(store.sizes.tolist()):
        for start in range(0, size - 1, context):
            ids = torch.from_numpy(store.read(document, start, min(start + context, size - 1) + 1).astype(np.int64))
            loss = F.cross_entropy(model.head(model(ids[None, :-1])[0][0]), ids[1:], reduction="none")
            for index, value in enumerate(loss.tolist()):
                place = start + index + 1
                first = 1 if place < 16 else 2 ** (place.bit_length() - 1)
                sums.setdefault(first, []).append(value)
    table = evaluate_documents(model, store, EvaluationOptions(ctx_len=16, rows=2, context=context))
    found = {place.first: place.loss for place in table.by_position()}
    assert found == {first: pytest.approx(np.mean(values), rel=1e-4) for first, values in sorted(sums.items())}


def test_documents_begin_with_a_given_state():
    model, store = lively_model(SHAPE), make_store([40, 90, 2])
    before = torch.randint(48, (1, 20), generator=torch.Generator().manual_seed(3))
    _, state = model(before)
    table = evaluate_documents(model, store, EvaluationOptions(ctx_len=16, rows=2), initial=state)
    losses = []
    for document, size in enumerate([40, 90, 2]):
        ids = torch.from_numpy(store.read(document, 0, size).astype(np.int64))
        hidden, _ = model(torch.cat((before[0], ids[:-1]))[None])
        losses += F.cross_entropy(model.head(hidden[0, 20:]), ids[1:], reduction="none").tolist()
    assert table.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert table.loss != pytest.approx(evaluate_documents(model, store, EvaluationOptions(ctx_len=16)).loss, rel=1e-4)


def test_progress_counts_every_target():
    counted = []
    evaluate_documents(lively_model(SHAPE), make_store(), EvaluationOptions(ctx_len=16), progress=counted.append)
    assert sum(counted) == sum(max(0, size - 1) for size in SIZES)


@pytest.mark.parametrize(
    ("sizes", "words"), [([1, 0], "two or more tokens"), ([], "two or more tokens"), ([9], "document 0 at offset 3")]
)
def test_what_cannot_be_evaluated_is_said(sizes, words):
    store = make_store(sizes)
    if sizes == [9]:
        store.read_flat(0, 9)[3] = 48
    with pytest.raises(DataError, match=words):
        evaluate_documents(lively_model(SHAPE), store, EvaluationOptions(ctx_len=16))


@pytest.mark.parametrize(("name", "value"), [("ctx_len", 0), ("ctx_len", 100), ("rows", 0), ("context", 0)])
def test_options_out_of_range(name, value):
    with pytest.raises(ConfigError, match="out of range"):
        EvaluationOptions(**{name: value})


class LiveTensors(TorchDispatchMode):
    """Bytes of the distinct storages of tensors that operations have made and that are still alive, at their peak."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.live[id(tensor)] = weakref.ref(tensor)
        alive = {key: tensor for key, ref in self.live.items() if (tensor := ref()) is not None}
        self.live = {key: self.live[key] for key in alive}
        storages = [tensor.untyped_storage() for tensor in alive.values()]
        self.peak = max(self.peak, sum({x.data_ptr(): x.nbytes() for x in storages}.values()))
        return result


def peak_bytes(num_tokens):
    store, model = make_store([num_tokens]), lively_model(SHAPE)
    gc.collect()
    with LiveTensors() as live:
        evaluate_documents(model, store, EvaluationOptions(ctx_len=256, rows=1))
    return live.peak


def test_memory_does_not_grow_with_a_document():
    # One part is 4,096 tokens; what is alive then is all that a document of any length needs.
    short, long = peak_bytes(2 * 4096 + 1), peak_bytes(8 * 4096 + 1)
    assert short > 500_000
    assert long <= 1.02 * short


def test_loss_of_nothing_is_not_a_number():
    store = make_store([5], masked=True)
    store._masks[0][:] = 0
    table = evaluate_documents(lively_model(SHAPE), store, EvaluationOptions(ctx_len=16))
    assert math.isnan(table.loss)
    assert table.by_position() == []

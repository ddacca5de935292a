"""What exact gradients are for: a fact that crosses more chunks than truncated gradients do."""

from __future__ import annotations

import pytest
import torch

from benchmarks.recall import (
    ALLOWED,
    CHUNK,
    NUM_CHUNKS,
    NUM_SYMBOLS,
    QUESTION,
    WANTED,
    ModuleEngine,
    Run,
    add_gradients,
    main,
    make_model,
    make_rows,
    train_recall,
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_rows_say_the_symbol_once_and_ask_for_it_late():
    rows = make_rows(256, torch.Generator().manual_seed(1))
    is_symbol = rows.ids_BT < NUM_SYMBOLS
    assert (is_symbol.sum(1) == 1).all()
    assert (is_symbol.long().argmax(1) < CHUNK).all()
    assert (rows.ids_BT[is_symbol] == rows.targets_BT[:, -1]).all()
    assert (rows.ids_BT[:, -1] == QUESTION).all()
    assert (rows.ids_BT == QUESTION).sum() == 256
    assert rows.weight_BT.sum(1).eq(1).all()
    assert rows.weight_BT[:, -1].eq(1).all()
    assert rows.targets_BT[:, -1].unique().numel() == NUM_SYMBOLS
    whole_chunks_between = NUM_CHUNKS - 2
    assert whole_chunks_between >= 4


def test_only_a_window_over_all_chunks_reaches_the_symbol():
    model = make_model(0)
    with torch.no_grad():
        for parameter in model.parameters():
            # The official zeros hide the path from the symbol to the answer.
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    batch = make_rows(8, torch.Generator().manual_seed(2))
    shown = batch.targets_BT[:, -1].unique()
    sizes = {}
    for window in (1, NUM_CHUNKS - 1, NUM_CHUNKS, "full"):
        model.zero_grad()
        add_gradients(ModuleEngine(model), batch, window)
        gradient = model.emb.weight.grad
        assert gradient[QUESTION].any()
        sizes[window] = float(gradient[shown].norm(dim=1).min())
    assert sizes[1] == sizes[NUM_CHUNKS - 1] == 0
    assert sizes["full"] > 0
    assert sizes[NUM_CHUNKS] == sizes["full"]


def test_programme_prints_runs_draws_them_and_fails_without_recall(tmp_path, capsys):
    picture = tmp_path / "recall.png"
    assert main(["--seeds", "3", "--steps", "2", "--windows", "full", "--out", str(picture)]) == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.split("\n")[1].split()[:2] == ["full", "3"]
    assert Run(1, 0, [0, 9], [0.0, 0.1]).passes()
    assert not Run(1, 0, [0, 4, 9], [0.0, 0.3, 0.1]).passes()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_full_window_recalls_where_truncation_stays_at_chance(seed):
    exact, truncated = train_recall("full", seed), train_recall(1, seed)
    assert exact.steps == truncated.steps
    assert exact.recall[0] == truncated.recall[0]
    assert exact.recall[-1] >= WANTED == 0.99
    assert max(truncated.recall) <= ALLOWED == 1 / 16 + 0.1

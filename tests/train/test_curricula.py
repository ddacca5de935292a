"""Chunk lengths and document lengths that change with the steps, in whole runs."""

import dataclasses
import json
import logging
from pathlib import Path

import pytest

from trainer.config import CheckpointConfig, DataConfig, ModelConfig, RunConfig, TrainerConfig
from trainer.train.callbacks import METRICS_FILE, read_metrics
from trainer.train.run import execute
from trainer.train.schedule import chunk_length

OPTIONS = {"accelerator": "cpu", "enable_progress_bar": False, "log_every_n_steps": 1}


@pytest.fixture
def run(tmp_path):
    file = tmp_path / "texts.jsonl"
    records = [{"text": f"document {i}: " + "abcdefgh " * (3 + 4 * (i % 6))} for i in range(16)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return RunConfig(
        model=ModelConfig(
            n_layer=2, n_embd=32, head_size=16, ctx_len=64, lr_init=1e-3, kernel="chunked", bptt_window="full"
        ),
        data=DataConfig(source=str(file), data_path=str(tmp_path / "data"), tokenizer="byte", test_split=0),
        trainer=TrainerConfig(target_batch_size=2, microbatch_size=2),
        checkpoint=CheckpointConfig(dir=str(tmp_path / "run"), every_steps=3, keep=0),
        precision="64-true",
        max_steps=6,
        accelerator="cpu",
    )


def changed(run, directory, **model):
    checkpoint = dataclasses.replace(run.checkpoint, dir=directory)
    return dataclasses.replace(run, model=dataclasses.replace(run.model, **model), checkpoint=checkpoint)


def trained(run):
    execute("fit", run, OPTIONS)
    return [row for row in read_metrics(Path(run.checkpoint.dir) / METRICS_FILE) if "loss" in row]


def losses(rows):
    return [row["loss"] for row in rows]


def test_chunk_length_is_a_function_of_the_step():
    model = ModelConfig(ctx_len=64, ctx_len_schedule=[[0, 16], [2, 32], [4, 64]])
    assert [chunk_length(model, step) for step in range(6)] == [16, 16, 32, 32, 64, 64]
    assert chunk_length(ModelConfig(ctx_len=48), 9) == 48


def test_a_chunk_schedule_changes_no_exact_gradient(run, tmp_path, caplog):
    plain = trained(run)
    scheduled = changed(run, str(tmp_path / "scheduled"), ctx_len_schedule=[[0, 16], [2, 32], [4, 64]])
    with caplog.at_level(logging.INFO, "trainer"):
        found = trained(scheduled)
    assert losses(found) == pytest.approx(losses(plain), rel=1e-9)
    said = [
        record.message
        for record in caplog.records
        if record.message.startswith("step=") and "ctx_len" in record.message
    ]
    assert said == ["step=3 ctx_len=32", "step=5 ctx_len=64"]


def test_a_chunk_schedule_acts_on_truncated_gradients(run, tmp_path):
    """The first two steps are those of chunks of 16 tokens, the rest are not."""
    short = losses(trained(changed(run, str(tmp_path / "short"), ctx_len=16, bptt_window=1)))
    long = losses(trained(changed(run, str(tmp_path / "long"), bptt_window=1)))
    both = losses(trained(changed(run, str(tmp_path / "both"), bptt_window=1, ctx_len_schedule=[[0, 16], [2, 64]])))
    # The loss of step n shows the updates of the steps before it.
    assert both[:3] == pytest.approx(short[:3], rel=1e-12)
    assert both[3] != pytest.approx(short[3], rel=1e-9)
    assert both[2] != pytest.approx(long[2], rel=1e-9)


CURRICULUM = {
    "ctx_len_schedule": [[0, 16], [2, 32], [5, 64]], "ctx_len_cutoffs": [40, 90], "ctx_len_warmup_steps": [2, 5],
    "token_dropout_rate": 0.2, "token_loss_threshold": 5.5, "bptt_window": 1,
}  # fmt: skip


def test_a_resumed_curriculum_is_that_of_one_run(run, tmp_path):
    one = changed(run, str(tmp_path / "one"), **CURRICULUM)
    whole = trained(one)
    resumed = changed(run, str(tmp_path / "resumed"), **CURRICULUM)
    rest = trained(dataclasses.replace(resumed, resume=str(tmp_path / "one" / "step-3")))
    assert [row["loss_hex"] for row in rest] == [row["loss_hex"] for row in whole[3:]]
    assert [row["tokens"] for row in rest] == [row["tokens"] for row in whole[3:]]


def test_cut_documents_have_fewer_tokens_and_the_schedule_still_ends(run, tmp_path):
    epoch = dataclasses.replace(run, max_steps=-1, max_epochs=1)
    plain = trained(epoch)
    cut = trained(
        changed(
            epoch,
            str(tmp_path / "cut"),
            ctx_len_cutoffs=[20],
            ctx_len_warmup_steps=[4],
            lr_schedule="linear",
            warmup_steps=0,
        )
    )
    assert len(cut) == len(plain) == 8
    assert cut[-1]["tokens"] < plain[-1]["tokens"]
    # Counted in steps: the last step's rate is one eighth away from the end.
    assert cut[-1]["lr"] == pytest.approx(1e-3 * (1 - 0.9 * 7 / 8))


def test_a_threshold_above_all_losses_trains_nothing(run, tmp_path):
    found = trained(changed(run, str(tmp_path / "none"), token_loss_threshold=50.0, weight_decay=0.0))
    assert [row["grad_norm"] for row in found] == [0] * 6
    assert 4 < found[0]["loss"] < 8

from __future__ import annotations

import zlib
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from trainer.config.schema import DataConfig, ModelConfig, RunConfig, TrainerConfig
from trainer.data import module as module_under_test
from trainer.data.binidx import BinIdxWriter
from trainer.data.lanes import Lanes, StepBatch, ValidationLanes
from trainer.data.module import LanesDataModule
from trainer.data.store import FlatStore
from trainer.errors import ConfigError, DataError

VOCAB_SIZE = 300
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning"),
]


def make_store(sizes, seed=0):
    ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE, sum(sizes)).astype(np.uint16)
    return FlatStore("store", [ids], np.array(sizes))


@pytest.fixture
def prepared(monkeypatch):
    """Stands in for the preparation of data; lists what was prepared."""
    calls = []
    stores = make_store([20, 33, 7, 50, 12, 40, 25, 9, 31]), make_store([10, 14, 3], seed=1)
    monkeypatch.setattr(module_under_test, "prepare", lambda data, **checks: calls.append((data, checks)))
    monkeypatch.setattr(module_under_test, "open_prepared", lambda data, **checks: (*stores, {"tokens": 227}))
    return calls


def make_run(**data):
    return RunConfig(
        model=ModelConfig(ctx_len=16),
        data=DataConfig(**data),
        trainer=TrainerConfig(target_batch_size=2, microbatch_size=1),
    )


class Recorder(pl.LightningModule):
    """One weight whose value depends on every batch and on their order."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.seen, self.validated = [], []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def training_step(self, batch, batch_idx):
        assert type(batch) is StepBatch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for micro in batch.microbatches:
            assert micro.weight_BT.dtype == torch.float32
            self.manual_backward(self.weight.cos() * micro.ids_BT.double().std())
        optimizer.step()
        checksum = zlib.crc32(b"".join(micro.ids_BT.numpy().tobytes() for micro in batch.microbatches))
        self.seen.append((batch.epoch, batch.step_in_epoch, checksum, self.weight.item()))

    def validation_step(self, batch, batch_idx):
        self.validated.append((self.global_step, batch.num_tokens))


class SaveOften(pl.Callback):
    """Saves at each moment at which a run may save."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, trainer, when):
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}-{when}.ckpt")

    def on_train_batch_end(self, trainer, *_):
        self.save(trainer, "step")

    def on_validation_end(self, trainer, _):
        self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer, _):
        self.save(trainer, "epoch")


def fit(run, callbacks=(), ckpt_path=None, **options):
    options = {"max_epochs": 3, "accelerator": "cpu", "num_sanity_val_steps": 0} | options
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    model = Recorder()
    trainer = pl.Trainer(**options, **quiet, callbacks=list(callbacks))
    trainer.fit(model, datamodule=LanesDataModule(run, VOCAB_SIZE), ckpt_path=ckpt_path, weights_only=True)
    return model


@pytest.mark.parametrize("batching", ["documents", "stream"])
@pytest.mark.parametrize("depth", [0, 3])
def test_resume_from_any_lightning_checkpoint_equals_the_uninterrupted_run(prepared, tmp_path, batching, depth):
    run = make_run(batching=batching, dataloader_prefetch_factor=depth)
    whole = fit(run, [SaveOften(tmp_path)])
    steps = len(whole.seen) // 3
    assert [seen[:2] for seen in whole.seen] == [(epoch, step) for epoch in range(3) for step in range(steps)]
    checkpoints = sorted(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) == 3 * (steps + 2)
    for checkpoint in checkpoints:
        done = int(checkpoint.stem.split("-")[0])
        assert fit(run, ckpt_path=checkpoint).seen == whole.seen[done:], checkpoint


@pytest.mark.parametrize("batching", ["documents", "stream"])
def test_validation_sees_every_token_at_each_epochs_end(prepared, batching):
    model = fit(make_run(batching=batching), num_sanity_val_steps=2)
    steps = len(model.seen) // 3
    sanity, epochs = model.validated[:2], model.validated[2:]
    assert {step for step, _ in sanity} == {0}
    assert [step for step, _ in epochs] == [steps] * 3 + [2 * steps] * 3 + [3 * steps] * 3
    assert sum(tokens for _, tokens in epochs) == 3 * (9 + 13 + 2)


def test_bf16_training_leaves_token_weights_alone(prepared):
    # Recorder asserts the dtype; Lightning casts what it finds in tuples under this precision.
    fit(make_run(), precision="bf16-true", max_epochs=1)


def test_seek_puts_training_at_a_position(prepared):
    run = make_run()
    source = LanesDataModule(run, VOCAB_SIZE)
    source.setup("fit")
    steps = list(source.train_dataloader())
    for before_lanes in (True, False):
        data = LanesDataModule(run, VOCAB_SIZE)
        data.setup("fit")
        if not before_lanes:
            data.train_dataloader()
        data.seek(steps[1].position)
        data.seek(None)
        assert [step.step_in_epoch for step in data.train_dataloader()] == list(range(2, len(steps)))
        data.teardown("fit")
        assert next(iter(data.train_dataloader())).step_in_epoch == 0


def test_a_rank_that_is_known_late_gets_its_own_rows_at_the_same_position(prepared):
    run = make_run(batching="stream")
    data = LanesDataModule(run, VOCAB_SIZE)
    data.setup("fit")
    early = data.train_dataloader()
    assert data.train_dataloader() is early
    step = next(iter(early))
    data.trainer = SimpleNamespace(world_size=2, global_rank=1)
    late = data.train_dataloader()
    assert late.state_dict() == step.position
    assert [batch.lane_ids for batch in next(iter(late)).microbatches] == [(1,)]


def test_data_is_prepared_once_and_its_manifest_kept(prepared):
    run = make_run()
    data = LanesDataModule(run, VOCAB_SIZE)
    data.prepare_data()
    assert prepared == [(run.data, {"seed": run.trainer.deterministic_order_seed, "vocab_size": VOCAB_SIZE})]
    data.setup("fit")
    assert data.manifest == {"tokens": 227}
    assert isinstance(data.train_dataloader(), Lanes)
    assert isinstance(data.val_dataloader(), ValidationLanes)


def test_no_validation_set_means_no_validation(prepared, monkeypatch):
    monkeypatch.setattr(module_under_test, "open_prepared", lambda data, **checks: (make_store([20, 30]), None, {}))
    model = fit(make_run(), max_epochs=1)
    assert len(model.seen) == 1
    assert model.validated == []
    with pytest.raises(DataError, match=r"data\.test_split: the prepared data set has no validation documents"):
        LanesDataModule(make_run(), VOCAB_SIZE).setup("validate")


@pytest.fixture
def binidx_prefix(tmp_path):
    with BinIdxWriter(tmp_path / "tokens") as writer:
        for document in ([5, 6, 7, 0], [8, 290, 0], [9, 9, 9, 9, 0]):
            writer.add_document(document)
    return tmp_path / "tokens"


def test_prepared_files_are_opened(binidx_prefix):
    run = make_run(source="binidx", source_data_dir=str(binidx_prefix), test_split=1)
    data = LanesDataModule(run, VOCAB_SIZE)
    data.prepare_data()
    data.setup("fit")
    (step,) = data.train_dataloader()
    assert sorted(batch.targets_BT.tolist() for batch in step.microbatches) == [[[6, 7, 0]], [[290, 0]]]
    (step,) = data.val_dataloader()
    assert step.microbatches[0].ids_BT.tolist() == [[9, 9, 9, 9]]
    assert step.position is None


def test_token_ids_beyond_the_vocabulary_are_refused(binidx_prefix):
    run = make_run(source="binidx", source_data_dir=str(binidx_prefix))
    with pytest.raises(DataError, match="token id 290 in document 1 at offset 1"):
        LanesDataModule(run, 290).setup("fit")


def test_default_batch_is_one_micro_batch_per_process(prepared):
    run = RunConfig(data=DataConfig(batching="stream"), trainer=TrainerConfig(microbatch_size=3))
    data = LanesDataModule(run, VOCAB_SIZE)
    data.setup("fit")
    step = next(iter(data.train_dataloader()))
    assert [batch.lane_ids for batch in step.microbatches] == [(0, 1, 2)]


def test_rows_that_do_not_divide_are_refused(prepared):
    run = RunConfig(data=DataConfig(batching="stream"), trainer=TrainerConfig(target_batch_size=4, microbatch_size=3))
    data = LanesDataModule(run, VOCAB_SIZE)
    data.setup("fit")
    with pytest.raises(ConfigError, match=r"trainer\.target_batch_size.*set it to 6"):
        data.train_dataloader()

"""Resuming at the edges: in a document, at the end of an epoch or a run, from another folder, after damage."""

from __future__ import annotations

import json
import shutil

import pytest
from harness import checkpoints, read_rows

from trainer.checkpoint.find import newest_valid
from trainer.checkpoint.tensorfile import load_safetensors


def losses(rows) -> list[tuple[int, str]]:
    return [(row["step"], row["loss_hex"]) for row in rows if "loss_hex" in row]


def content(run) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*.*") if path.is_file()}


def damage(folder):
    """Flip one byte in the middle of the largest file."""
    path = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# ---- within documents and epochs


@pytest.mark.fault(38)
def test_resumed_in_the_middle_of_documents_the_states_are_bit_equal(truth, another):
    start = 3
    another.fit(f"--resume={truth.step(start)}", "--checkpoint.every_steps=1", "--checkpoint.keep=0")
    names = [f"lane.{lane}.{index}" for lane in range(4) for index in range(6)]
    for step in range(start + 1, 12):
        expected = load_safetensors(truth.step(step) / "rank-00000.safetensors")
        found = load_safetensors(another.run / f"step-{step}" / "rank-00000.safetensors")
        assert sorted(n for n in found if n.startswith("lane.")) == sorted(names)
        assert all(expected[name].equal(found[name]) for name in names), f"step {step}"
    assert any(expected[name].abs().max() > 0 for name in names)


@pytest.mark.parametrize(
    "offset", [pytest.param(-1, marks=pytest.mark.slow), 0, pytest.param(1, marks=pytest.mark.slow)]
)
@pytest.mark.fault(39, 40)
def test_resumed_around_the_edge_of_an_epoch(truth, another, offset):
    """The truth validates at the edge; a run resumed there neither repeats that nor leaves a later one out."""
    start = truth.edge + offset
    output = another.fit(f"--resume={truth.step(start)}")
    assert f"at step {start}" in output
    assert losses(read_rows(another.run)) == losses(truth.record.rows)[start:]
    found = another.record()
    assert found.files == truth.record.files
    assert found.validation == [pair for pair in truth.record.validation if pair[0] > start]


@pytest.mark.fault(39)
def test_a_signal_or_kill_in_the_last_step_leaves_a_run_to_finish(truth, another):
    assert another.start(failpoint="renamed:6").wait() == -9
    assert checkpoints(another.run)[-1].name == "step-11"
    assert "nothing left to train" in another.fit()
    assert another.record().differences(truth.record) == []


@pytest.mark.parametrize(
    "limit",
    [
        ("--trainer.max_steps=4",),
        ("--trainer.max_steps=-1", "--trainer.max_tokens=500"),
        pytest.param(("--trainer.max_epochs=1",), marks=pytest.mark.slow),
    ],
    ids=["max_steps", "max_tokens", "max_epochs"],
)
@pytest.mark.fault(39)
def test_a_finished_run_stays_as_it_is(another, limit):
    another.fit(*limit)
    before = content(another.run)
    output = another.fit(*limit)
    assert "nothing left to train" in output
    assert f"step-{read_rows(another.run)[-1]['step']}" in output
    assert content(another.run) == before


@pytest.mark.slow
@pytest.mark.parametrize("limits", [("max_steps", 4, 7), ("max_tokens", 500, 900)], ids=lambda limits: limits[0])
@pytest.mark.fault(39)
def test_a_finished_run_can_be_made_longer(make_workplace, limits):
    """Also one that ended in the middle of an epoch, and off the steps that are saved."""
    steady = {"lr_schedule": "constant"}
    whole, parts = make_workplace("whole", model=steady), make_workplace("parts", model=steady)
    whole.fit()
    for limit in limits[1:]:
        parts.fit(f"--trainer.{limits[0]}={limit}")
    parts.fit()
    found = parts.record()
    if limits[0] == "max_tokens":  # Lightning validates where a run is told to stop
        found.validation = [pair for pair in found.validation if pair in whole.record().validation]
    assert found.differences(whole.record()) == []


@pytest.mark.fault(34)
def test_lanes_go_on_with_micro_batches_of_another_size(truth, another):
    start = 3
    output = another.fit(f"--resume={truth.step(start)}", "--trainer.microbatch_size=4", "--trainer.max_steps=5")
    assert "trainer.microbatch_size 2 -> 4" in output
    pairs = zip(read_rows(another.run), truth.record.rows[start:], strict=False)
    assert [found["loss"] for found, _ in pairs] == pytest.approx(
        [row["loss"] for row in truth.record.rows[start:5]], rel=1e-5
    )


# ---- what else is in the folder


@pytest.mark.promise(3)
def test_a_new_run_sets_earlier_checkpoints_aside(truth, another):
    """They would pass for the newest of the new run, and their presence would get its own ones removed."""
    another.fit("--trainer.max_steps=6")
    old = {path.name: path for path in checkpoints(another.run)}
    earlier = another.record()
    output = another.fit("--resume=never", "--trainer.max_steps=4", "--seed_everything=5")
    assert "moved step-4, step-6 to" in output
    assert [path.name for path in checkpoints(another.run)] == ["step-2", "step-4"]
    aside = another.run / "set-aside-1"
    assert sorted(path.name for path in aside.iterdir()) == ["metrics.jsonl", *sorted(old)]
    assert losses(read_rows(aside)) == losses(earlier.rows)
    assert newest_valid(aside)[0].name == "step-6"


@pytest.mark.slow
@pytest.mark.promise(3)
@pytest.mark.parametrize("moved", [1, 2])
def test_killed_while_setting_aside_no_checkpoint_is_lost(another, moved):
    """The newest goes first, so that what is left is in order; the next run moves the rest."""
    another.fit("--trainer.max_steps=6", "--checkpoint.keep=0")
    before = content(another.run)
    assert another.start("--resume=never", failpoint=f"set_aside:{moved}").wait() == -9
    assert [path.name for path in checkpoints(another.run)] == ["step-2", "step-4", "step-6"][:-moved]
    assert newest_valid(another.run)[0] is not None or moved == 3
    another.fit("--resume=never", "--trainer.max_steps=1")
    after = [path for folder in ("set-aside-1", "set-aside-2") for path in (another.run / folder).glob("step-*")]
    assert sorted(path.name for path in after) == ["step-2", "step-4", "step-6"]
    for path in after:
        for file in path.iterdir():
            assert file.read_bytes() == before[str(another.run / path.name / file.name)]


def test_a_run_that_did_not_get_to_train_moves_nothing(another):
    another.fit("--trainer.max_steps=2")
    another.fit("--resume=never", "--data.test_split=14", code=2)
    assert [path.name for path in checkpoints(another.run)] == ["step-2"]
    assert not (another.run / "set-aside-1").exists()


def test_going_back_to_an_older_checkpoint(truth, another):
    another.fit("--checkpoint.keep=0")
    output = another.fit(f"--resume={another.run}/step-4")
    assert "moved step-6, step-8, step-10, step-11 to" in output
    assert another.record().differences(truth.record) == []
    assert len(losses(read_rows(another.run / "set-aside-1"))) == 11


@pytest.mark.fault(25, 26)
def test_a_damaged_newest_checkpoint_is_named_and_does_no_further_harm(truth, another):
    """Kept among the newest, it would push the valid ones out."""
    another.fit("--trainer.max_steps=6")
    damage(another.run / "step-6")
    assert another.start("--checkpoint.keep=1", failpoint="pruning:1").wait() == -9
    assert newest_valid(another.run)[0].name in ("step-6", "step-8")
    output = another.fit("--checkpoint.keep=1")
    assert another.record().differences(truth.record) == []
    assert "rejected step-6" in (another.folder / "001.log").read_text()
    assert "checksum" in (another.folder / "001.log").read_text()
    assert "rejected" not in output


@pytest.mark.fault(31)
def test_without_a_valid_checkpoint_a_run_does_not_start_over(another):
    another.fit("--trainer.max_steps=2")
    damage(another.run / "step-2")
    output = another.fit(code=3)
    assert "no valid checkpoint" in output
    assert str(another.run) in output
    assert len(losses(read_rows(another.run))) == 2


@pytest.mark.promise(3)
def test_a_checkpoint_that_is_not_there_is_not_replaced_by_a_new_run(another):
    assert "'nowhere/step-5'" in another.fit("--resume=nowhere/step-5", code=2)
    assert not another.run.exists()


@pytest.mark.slow
@pytest.mark.fault(65)
def test_another_number_of_threads_is_mentioned(truth, another):
    output = another.fit(f"--resume={truth.step(10)}", faults=("two_threads",))
    assert "saved with 1 CPU threads, resumed with 2" in output


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--model.n_layer=3", "other sizes"),
        ("--trainer.target_batch_size=2", "trainer.target_batch_size"),
        ("--trainer.deterministic_order_seed=9", "trainer.deterministic_order_seed"),
        ("--data.test_split=1", "data.data_path"),
    ],
)
@pytest.mark.fault(32, 33, 34)
def test_a_checkpoint_that_does_not_fit_is_refused(truth, another, option, name):
    output = another.fit(f"--resume={truth.step(3)}", option, code=2)
    assert name in output.splitlines()[-1]
    assert "Traceback" not in output


@pytest.mark.fault(34)
def test_other_settings_may_change_and_are_listed(truth, another):
    output = another.fit(f"--resume={truth.step(9)}", "--model.grad_clip=0.5", "--trainer.max_steps=10")
    assert "changed since step-9: model.grad_clip 1.0 -> 0.5" in output
    assert "changed since step-9: max_steps 11 -> 10" in output


# ---- the record of steps


@pytest.mark.fault(3)
def test_a_half_written_line_is_dropped(truth, another):
    """Also one that looks whole, of a step that has to be trained again."""
    another.fit("--trainer.max_steps=5")
    path = another.run / "metrics.jsonl"
    shutil.rmtree(another.run / "step-5")
    with path.open("ab") as file:
        file.write(b'\n\0\0\0\n17\n"step"\n{"step": 6, "loss": 5.1, "lo\xff')
    another.fit()
    assert another.record().differences(truth.record) == []
    for line in path.read_text().splitlines():
        assert "step" in json.loads(line)

"""Full disks, folders that cannot be written or vanish, and two runs in one folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from harness import checkpoints

from trainer.checkpoint.find import newest_valid


def digests(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def assert_storage_error(output: str, *texts: str) -> None:
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, output
    assert all(text in errors[0] for text in ("cannot write", "free", "needed", *texts)), errors[0]
    assert "Traceback" not in output


# `half` is passed four times in a save: in the files of lane states, weights and moments, and before the counters.
FULL = ["mkdir:3", "half:9", "half:11", "half:12", "written:3", "fsynced:3", "manifest:3", "metrics:6"]
FAST = ["half:11", "manifest:3", "metrics:6"]


@pytest.mark.parametrize("point", [p if p in FAST else pytest.param(p, marks=pytest.mark.slow) for p in FULL])
@pytest.mark.fault(18, 19)
def test_a_full_disk_leaves_older_checkpoints_as_they_are(truth, another, point):
    output = another.fit(code=4, failpoint=f"{point}:enospc")
    assert_storage_error(output, "No space left", str(another.run))
    assert newest_valid(another.run)[0].name == "step-4"
    for path in (another.run / "step-4").glob("*.safetensors"):
        assert path.read_bytes() == (truth.step(4) / path.name).read_bytes()
    another.fit()
    assert another.record().differences(truth.record) == []
    assert list(another.run.glob(".step-*")) == []


@pytest.mark.promise(5)
def test_a_broken_disk_is_named(another):
    assert_storage_error(another.fit(code=4, failpoint="half:10:eio"), "Input/output error", f"{another.run}/step-6")


@pytest.mark.fault(18)
def test_writes_that_fail_half_way(truth, another):
    """The kernel refuses what goes beyond a limit: the file of moments is cut off."""
    output = another.fit(code=4, faults=("small_files:300000",))
    assert_storage_error(output, "step-2", "File too large")
    assert checkpoints(another.run) == []
    another.fit()
    assert another.record().differences(truth.record) == []


@pytest.mark.promise(5)
def test_too_little_room_is_found_before_the_first_step(another):
    output = another.fit(code=4, faults=("little_room:700000",))
    assert_storage_error(output, str(another.run), "free 700000 bytes", "needed 716")
    assert not another.run.exists()


@pytest.mark.fault(22)
def test_a_read_only_folder_is_found_before_the_first_step(another):
    another.run.mkdir(mode=0o555)
    assert_storage_error(another.fit(code=4, faults=("unprivileged",)), "Permission denied", str(another.run))
    output = another.fit(f"--checkpoint.dir={another.run}/new", code=4, faults=("unprivileged",))
    assert_storage_error(output, "Permission denied", f"{another.run}/new")


@pytest.mark.parametrize("point", ["optimizer:6", pytest.param("half:6", marks=pytest.mark.slow)])
@pytest.mark.fault(23)
def test_a_folder_that_vanishes_is_named(another, point):
    name, passage = point.split(":")
    output = another.fit(code=4, faults=(f"folder_vanishes:{name}:{passage}:{another.run}",))
    assert_storage_error(output, "No such file or directory", str(another.run))


@pytest.mark.fault(18, 19)
@pytest.mark.parametrize("point", ["half:6", pytest.param("manifest:2", marks=pytest.mark.slow), "metrics:6"])
def test_training_can_go_on_unsaved(truth, another, point):
    """Nothing of a failed save is left, and lines of metrics come with a later one."""
    output = another.fit("--checkpoint.on_failure=warn", failpoint=f"{point}:enospc")
    assert ("kept for later" if "metrics" in point else "not saved (1 so far)") in output
    assert "No space left" in output
    assert list(another.run.glob(".step-*")) == []
    assert another.record().differences(truth.record) == []


@pytest.mark.fault(23)
def test_the_last_checkpoint_has_to_succeed(another):
    fault = f"folder_vanishes:optimizer:6:{another.run}"
    output = another.fit("--checkpoint.on_failure=warn", code=4, faults=(fault,))
    assert "not saved (3 so far)" in output
    assert_storage_error("\n".join(line for line in output.splitlines() if line.startswith("error:")), "step-11")


@pytest.mark.fault(68)
def test_too_little_memory_names_the_settings_to_change(truth, another):
    output = another.fit(code=2, faults=("out_of_memory:6",))
    error = output.splitlines()[-1]
    for text in (
        "memory: not enough for a step",
        "2 x model.ctx_len 16 = 32 tokens",
        "model.grad_cp",
        "microbatch_size",
    ):
        assert text in error
    assert "Traceback" not in output
    assert newest_valid(another.run)[0].name == "step-4"
    another.fit()
    assert another.record().differences(truth.record) == []


@pytest.mark.fault(70)
def test_many_shards_need_few_open_files(another, tmp_path):
    """Training and validation read 300 files with 60 descriptors."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(300):
        text = "".join(chr(97 + (i * number) % 26) for i in range(60))
        (folder / f"{number:03d}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    another.fit(
        "--data.source=json", f"--data.source_data_dir={folder}", f"--data.data_path={tmp_path}/data",
        "--data.test_split=20", faults=("few_open_files:60",),
    )  # fmt: skip
    assert checkpoints(another.run)[-1].name == "step-11"


@pytest.mark.fault(71)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("with spaces", marks=pytest.mark.slow),
        "ünïcode 模型",
        pytest.param("a'q\"$HOME;", marks=pytest.mark.slow),
    ],
)
def test_folders_may_have_any_name(truth, another, name):
    other = dataclasses.replace(another, run=another.folder / name)
    other.fit("--trainer.max_steps=4")
    other.fit()
    assert other.record().differences(truth.record) == []


@pytest.mark.slow
@pytest.mark.fault(71)
def test_a_linked_folder_is_as_good_as_its_target(truth, another):
    (another.folder / "elsewhere").mkdir()
    another.run.symlink_to(another.folder / "elsewhere")
    another.fit("--trainer.max_steps=4")
    assert another.run.is_symlink()
    another.fit(f"--resume={another.folder}/elsewhere/step-4")
    assert another.record().differences(truth.record) == []


@pytest.mark.fault(71)
def test_a_name_that_is_too_long_is_said(another):
    output = another.fit(f"--checkpoint.dir={another.folder}/{'x' * 300}", code=4)
    assert_storage_error(output, "File name too long")
    output = another.fit(f"--checkpoint.dir={another.folder}" + "/xxxxxxxxx" * 500, code=4)
    assert_storage_error(output, "File name too long")


def test_a_folder_that_no_file_system_has_is_named(another):
    output = another.fit("--checkpoint.dir=/proc/nope/run", code=4)
    assert_storage_error(output, "/proc/nope/run")


def test_data_that_is_not_there_leaves_no_folder_behind(another):
    output = another.fit("--data.source=text", "--data.data_path=/proc/nope", code=2)
    assert "Traceback" not in output
    assert not another.run.exists()
    another.run.mkdir()
    another.fit("--data.source=text", "--data.data_path=/proc/nope", code=2)
    assert os.listdir(another.run) == [".lock"], "a folder that was there stays"


@pytest.mark.fault(58)
def test_the_second_run_in_a_folder_is_refused(truth, another):
    """Until the first is dead: then it takes over, however the first ended."""
    first = another.start(failpoint="step:5:sleep")
    deadline = time.monotonic() + 60
    while "saved" not in first.output() or len(checkpoints(another.run)) < 2:
        assert time.monotonic() < deadline, first.output()
        time.sleep(0.02)
    before = {path: digests(path) for path in checkpoints(another.run)}
    output = another.fit(code=2)
    for text in ("another run uses this folder", f"pid {first.pid}", "host ", "start "):
        assert text in output
    assert {path: digests(path) for path in checkpoints(another.run)} == before
    first.signal(signal.SIGKILL)
    first.wait()
    assert "from a dead run" in another.fit()
    assert another.record().differences(truth.record) == []

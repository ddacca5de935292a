"""Which checkpoint a run continues from, and why others are passed over."""

import errno
import hashlib
import json
import logging
import os
import shutil

import pytest
import torch

from trainer.checkpoint.atomic import MANIFEST_NAME, SEAL, manifest_digest
from trainer.checkpoint.find import find_checkpoints, newest_valid, resolve_resume
from trainer.checkpoint.verify import read_manifest, verify_folder
from trainer.checkpoint.write import CheckpointPayload, write_checkpoint
from trainer.errors import CheckpointError, ResumeError


@pytest.fixture
def log(caplog):
    """Text logged under `trainer`, whether or not its logger passes records on."""
    logger = logging.getLogger("trainer")
    level = logger.level
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    yield caplog
    logger.setLevel(level)
    logger.removeHandler(caplog.handler)


@pytest.fixture
def run(tmp_path):
    """A run's folder with step-10 and step-20."""
    tensors = {"model.safetensors": {"a": torch.arange(100.0)}, "optimizer.safetensors": {"m": torch.ones(50)}}
    payload = CheckpointPayload(tensors=tensors, documents={"trainer.json": {"epoch": 1}})
    for step in (10, 20):
        write_checkpoint(tmp_path, step, payload)
    return tmp_path


def rewrite_manifest(folder, change):
    path = folder / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    change(manifest)
    manifest[SEAL] = manifest_digest(manifest)
    path.write_text(json.dumps(manifest))


@pytest.mark.fault(30)
def test_newest_is_chosen_by_number(run):
    shutil.copytree(run / "step-10", run / "step-9")
    rewrite_manifest(run / "step-9", lambda manifest: manifest.update(step=9))
    shutil.copytree(run / "step-10", run / "step-100")
    rewrite_manifest(run / "step-100", lambda manifest: manifest.update(step=100))
    os.utime(run / "step-9", (4e9, 4e9))
    assert [path.name for path in find_checkpoints(run)] == ["step-9", "step-10", "step-20", "step-100"]
    assert newest_valid(run) == (run / "step-100", [])


def test_nothing_to_resume_is_no_error(tmp_path):
    assert newest_valid(tmp_path) == (None, [])
    assert newest_valid(tmp_path / "missing") == (None, [])


@pytest.mark.fault(25)
def test_falls_back_and_says_why(run, log):
    (run / "step-20" / "model.safetensors").write_bytes(b"short")
    found, rejected = newest_valid(run)
    assert found == run / "step-10"
    assert rejected[0].path == run / "step-20"
    assert "5 bytes instead of" in rejected[0].reason
    assert "rejected step-20" in log.text
    assert "step-10" in log.text


@pytest.mark.fault(29)
def test_foreign_files_are_mentioned_and_not_taken(run, log):
    (run / "rwkv-99.pth").write_bytes(b"x")
    (run / "step-30.tmp").mkdir()
    (run / "step-030").mkdir()
    (run / ".step-40.tmp-1").mkdir()
    assert newest_valid(run)[0] == run / "step-20"
    assert "rwkv-99.pth" in log.text
    assert "step-30.tmp" in log.text


@pytest.mark.fault(31)
def test_none_valid_is_an_error_of_its_own(run):
    for step in (10, 20):
        (run / f"step-{step}" / MANIFEST_NAME).unlink()
    with pytest.raises(ResumeError, match=f"{run.name}: no valid checkpoint; 2 rejected.*no MANIFEST.json") as caught:
        newest_valid(run)
    assert caught.value.exit_code == 3
    with pytest.raises(ResumeError):
        resolve_resume("auto", run)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "trainer.json", MANIFEST_NAME])
@pytest.mark.parametrize("tenth", range(10))
@pytest.mark.fault(25, 26)
def test_newest_cut_or_altered_anywhere_is_rejected(run, name, tenth):
    path = run / "step-20" / name
    content = path.read_bytes()
    at = len(content) * tenth // 10
    path.write_bytes(content[:at])
    assert newest_valid(run)[0] == run / "step-10"
    flipped = bytearray(content)
    flipped[at] ^= 1
    path.write_bytes(bytes(flipped))
    found, rejected = newest_valid(run)
    assert found == run / "step-10"
    assert name in rejected[0].reason
    if name != MANIFEST_NAME:
        assert "checksum" in rejected[0].reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda manifest: manifest.update(step=10), "that of step 10"),
        (lambda manifest: manifest.pop("step"), "KeyError"),
        (lambda manifest: manifest.pop("format"), "format None instead of 1"),
        (lambda manifest: manifest.update(files=[]), "unreadable"),
        (lambda manifest: manifest.update(files={"a": {}}), "unreadable"),
        (lambda manifest: manifest["files"].update({"../x": {"bytes": 1, "sha256": ""}}), "outside of the folder"),
        (lambda manifest: manifest["files"].update({"gone": {"bytes": 1, "sha256": ""}}), "gone: missing"),
    ],
)
@pytest.mark.fault(27)
def test_manifest_of_another_kind_is_rejected(run, change, reason):
    rewrite_manifest(run / "step-20", change)
    found, rejected = newest_valid(run)
    assert found == run / "step-10"
    assert reason in rejected[0].reason


@pytest.mark.fault(27)
def test_manifest_that_is_no_table_is_rejected(run):
    (run / "step-20" / MANIFEST_NAME).write_text("[1]")
    with pytest.raises(CheckpointError, match="format 'list' instead of 1"):
        read_manifest(run / "step-20")


@pytest.mark.fault(24)
def test_read_error_rejects_only_that_checkpoint(run, monkeypatch):
    real = hashlib.file_digest

    def failing(file, name):
        if "step-20/optimizer" in str(file.name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, name)

    monkeypatch.setattr(hashlib, "file_digest", failing)
    found, rejected = newest_valid(run)
    assert found == run / "step-10"
    assert "Input/output error" in rejected[0].reason


@pytest.mark.promise(3)
def test_explicit_path_must_exist_and_be_whole(run):
    with pytest.raises(CheckpointError, match="/nonexistent/last.ckpt: no such checkpoint") as caught:
        resolve_resume("/nonexistent/last.ckpt", run)
    assert caught.value.exit_code == 2
    with pytest.raises(CheckpointError, match="a file, not a checkpoint folder.*model.load_model"):
        resolve_resume(str(run / "step-10" / "trainer.json"), run)
    assert resolve_resume(str(run / "step-10"), run) == run / "step-10"
    (run / "step-10" / "trainer.json").unlink()
    with pytest.raises(CheckpointError, match="trainer.json: missing"):
        resolve_resume(str(run / "step-10"), run)


def test_never_ignores_what_is_there_and_says_so(run, log):
    assert resolve_resume("never", run) is None
    assert "step-20" in log.text
    assert resolve_resume("auto", run) == run / "step-20"


def test_verified_manifest_has_the_facts(run):
    manifest = verify_folder(run / "step-20")
    assert (manifest.step, manifest.world_size, manifest.config_digest) == (20, 1, "")
    assert set(manifest.files) == {"model.safetensors", "optimizer.safetensors", "trainer.json"}


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="step-1: no such checkpoint folder"):
        verify_folder(tmp_path / "step-1")

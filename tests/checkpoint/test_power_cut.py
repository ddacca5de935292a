"""Power cuts: only what was forced to the disk is left. At every moment of a save some valid checkpoint is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from trainer.checkpoint.atomic import sweep
from trainer.checkpoint.find import newest_valid
from trainer.checkpoint.write import CheckpointPayload, read_checkpoint_tensors, write_checkpoint


class PowerCut(BaseException):
    """Ends a save at an instant."""


class Disk:
    """What is on a disk that keeps nothing but what fsync has been called for: bytes of files, names in folders."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.files: dict[int, bytes] = {}
        self.folders: dict[int, dict[str, int]] = {}
        self.calls = 0
        self.cut_at = -1
        self._fsync = os.fsync
        self._note(root)
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, fd: int) -> None:
        self.calls += 1
        if self.calls == self.cut_at:
            raise PowerCut
        self._note(Path(f"/proc/self/fd/{fd}").resolve())

    def _note(self, path: Path) -> None:
        number = path.stat().st_ino
        if path.is_dir():
            self.folders[number] = {entry.name: entry.stat().st_ino for entry in path.iterdir()}
        else:
            self.files[number] = path.read_bytes()

    def after_the_cut(self, target: Path) -> Path:
        """The tree as it is when the power is back."""
        self._rebuild(self.root.stat().st_ino, target)
        return target

    def _rebuild(self, number: int, target: Path) -> None:
        target.mkdir()
        for name, entry in self.folders[number].items():
            if entry in self.files:
                (target / name).write_bytes(self.files[entry])
            elif entry in self.folders:
                self._rebuild(entry, target / name)
            else:  # a name whose content was not forced: of a file nothing is left, of a folder no entry
                (target / name).touch()


def payload(value: int) -> CheckpointPayload:
    tensors = {
        "model.safetensors": {"a": torch.full((64,), float(value))},
        "rank-00000.safetensors": {"b": torch.ones(3)},
    }
    return CheckpointPayload(tensors=tensors, documents={"state.json": {"value": value}}, config_digest="d")


def save(folder: Path, step: int) -> None:
    write_checkpoint(folder, step, payload(step), keep=1)


@pytest.mark.fault(11)
def test_a_power_cut_at_any_instant_of_a_save_leaves_a_valid_checkpoint(tmp_path, monkeypatch):
    found = []
    for cut_at in range(1, 100):
        run = tmp_path / f"run-{cut_at}"
        run.mkdir()
        with monkeypatch.context() as patch:
            disk = Disk(run, patch)
            save(run, 1)
            disk.calls, disk.cut_at = 0, cut_at
            try:
                save(run, 2)
                is_cut = False
            except PowerCut:
                is_cut = True
        left = disk.after_the_cut(tmp_path / f"left-{cut_at}")
        sweep(left)
        folder, _ = newest_valid(left)
        assert read_checkpoint_tensors(folder, "model.safetensors")["a"][0].item() == int(folder.name[-1])
        found.append(folder.name)
        if not is_cut:
            break
    assert len(found) > 5, "the save forces several files and folders"
    assert found[0] == "step-1"
    assert found[-1] == "step-2", "a save that has ended is on the disk"
    assert found == sorted(found)

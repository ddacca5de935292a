"""A checkpoint is whole or absent: kills, full disks, power cuts, read-only folders."""

import json
import os
import resource
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import torch

from trainer.checkpoint import failpoints
from trainer.checkpoint.atomic import (
    MANIFEST_NAME,
    abandon_folder,
    atomic_file,
    atomic_folder,
    begin_folder,
    commit_folder,
    prepare_directory,
    prune,
    require_space,
    sweep,
)
from trainer.checkpoint.find import newest_valid
from trainer.checkpoint.verify import verify_folder
from trainer.checkpoint.write import CheckpointPayload, read_checkpoint_tensors, write_checkpoint
from trainer.errors import StorageError


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    failpoints.arm("")


def payload(value):
    tensors = {"model.safetensors": {"a": torch.full((64,), float(value)), "b": torch.arange(10)}}
    return CheckpointPayload(tensors=tensors, documents={"state.json": {"value": value}}, config_digest="d1")


def value_in(folder):
    return read_checkpoint_tensors(folder, "model.safetensors")["a"][0].item()


def digests(directory):
    return {path.relative_to(directory): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def run_and_die(action):
    """Fork, run `action` in the child, and return whether it was killed."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(
    ("point", "newest"),
    [
        ("mkdir", 2),
        ("half", 2),
        ("written", 2),
        ("fsynced", 2),
        ("manifest", 2),
        ("renamed", 3),
        ("pruning", 3),
    ],
)
@pytest.mark.fault(4, 5, 6, 7, 8, 9, 10)
def test_kill_at_any_point_leaves_a_valid_newest(tmp_path, point, newest):
    for step in (1, 2):
        write_checkpoint(tmp_path, step, payload(step))

    def write_armed():
        failpoints.arm(f"{point}:1:kill")
        write_checkpoint(tmp_path, 3, payload(3), keep=2)

    assert run_and_die(write_armed)
    found, rejected = newest_valid(tmp_path)
    assert found == tmp_path / f"step-{newest}"
    assert rejected == []
    assert value_in(found) == newest
    sweep(tmp_path)
    assert not list(tmp_path.glob(".step-*"))
    assert value_in(write_checkpoint(tmp_path, 4, payload(4), keep=2)) == 4


@pytest.mark.parametrize(("point", "value"), [("replacing", 1), ("renamed", 2)])
@pytest.mark.fault(9)
def test_kill_while_replacing_the_same_step_loses_nothing(tmp_path, point, value):
    write_checkpoint(tmp_path, 7, payload(1))

    def write_armed():
        failpoints.arm(f"{point}:1:kill")
        write_checkpoint(tmp_path, 7, payload(2))

    assert run_and_die(write_armed)
    sweep(tmp_path)
    found, rejected = newest_valid(tmp_path)
    assert rejected == []
    assert value_in(found) == value
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]


def test_same_step_is_replaced(tmp_path):
    write_checkpoint(tmp_path, 7, payload(1))
    write_checkpoint(tmp_path, 7, payload(2))
    assert value_in(tmp_path / "step-7") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]


@pytest.mark.parametrize("point", ["mkdir", "half", "written", "fsynced", "manifest"])
@pytest.mark.parametrize("action", ["enospc", "eio"])
@pytest.mark.fault(18, 19)
def test_failed_write_is_explained_and_leaves_older_ones_untouched(tmp_path, point, action):
    write_checkpoint(tmp_path, 1, payload(1))
    before = digests(tmp_path)
    failpoints.arm(f"{point}:1:{action}")
    with pytest.raises(StorageError, match=r"step-2: cannot write: .*free \d+ bytes, needed") as caught:
        write_checkpoint(tmp_path, 2, payload(2))
    assert caught.value.exit_code == 4
    if point != "mkdir":
        assert f"needed {payload(2).num_bytes()} bytes" in str(caught.value)
    sweep(tmp_path)
    assert digests(tmp_path) == before


@pytest.mark.fault(18)
def test_file_size_limit_stops_the_write_and_leaves_older_ones(tmp_path):
    write_checkpoint(tmp_path, 1, payload(1))
    before = digests(tmp_path)
    large = CheckpointPayload(tensors={"model.safetensors": {"a": torch.zeros(1 << 20)}})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(StorageError, match=f"needed {4 << 20} bytes"):
            write_checkpoint(tmp_path, 2, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert digests(tmp_path) == before


def test_too_little_room_is_seen_before_anything_is_written(tmp_path):
    with pytest.raises(StorageError, match=f"free .* needed {1 << 60} bytes"):
        require_space(tmp_path, 1 << 60)
    with pytest.raises(StorageError):
        prepare_directory(tmp_path / "new", 1 << 60)


@pytest.mark.fault(11)
def test_everything_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    events = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(fd):
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{fd}"))))
        real_fsync(fd)

    def rename(source, target):
        contents = sorted(path for path in source.rglob("*") if path.is_file())
        events.append(("rename", source, contents))
        return real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    with atomic_folder(tmp_path / "step-5", {"step": 5}) as temp:
        (temp / "shards").mkdir()
        (temp / "shards" / "a.bin").write_bytes(b"a")
        (temp / "b.bin").write_bytes(b"b")
    kinds = [event[0] for event in events]
    rename_at = kinds.index("rename")
    _, temp, contents = events[rename_at]
    synced = [event[1] for event in events[:rename_at]]
    assert set(contents) | {temp, temp / "shards"} <= set(synced)
    assert synced.index(temp / MANIFEST_NAME) > synced.index(temp / "b.bin")
    assert synced.index(temp) > synced.index(temp / MANIFEST_NAME)
    assert temp.parent == tmp_path
    assert ("fsync", tmp_path) in events[rename_at:]


@pytest.mark.fault(20, 21)
def test_temporary_directory_of_the_system_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/nonexistent")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: pytest.fail("the system's temporary directory is used"))
    write_checkpoint(tmp_path, 1, payload(1))
    verify_folder(tmp_path / "step-1")


def test_manifest_lists_sizes_and_facts(tmp_path):
    write_checkpoint(tmp_path, 3, payload(3))
    manifest = json.loads((tmp_path / "step-3" / MANIFEST_NAME).read_text())
    assert (manifest["step"], manifest["world_size"], manifest["config_digest"]) == (3, 1, "d1")
    assert set(manifest["files"]) == {"model.safetensors", "state.json"}
    size = (tmp_path / "step-3" / "model.safetensors").stat().st_size
    assert manifest["files"]["model.safetensors"]["bytes"] == size


def test_error_in_the_block_leaves_nothing(tmp_path):
    with pytest.raises(TypeError), atomic_folder(tmp_path / "step-1", {"step": 1}) as temp:
        (temp / "a").write_bytes(b"half") + None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["PytorchStreamWriter failed writing file data/0", "unexpected pos 576 vs 534"])
def test_failed_write_inside_a_library_is_a_storage_error(tmp_path, text):
    with pytest.raises(StorageError, match="cannot write"), atomic_folder(tmp_path / "step-1", {"step": 1}):
        raise RuntimeError(text)


def test_several_writers_share_one_folder(tmp_path):
    temp = begin_folder(tmp_path / "step-2")
    for rank in range(2):
        (temp / f"rank-{rank}.json").write_text("{}")
    commit_folder(temp, tmp_path / "step-2", {"step": 2, "world_size": 2})
    assert set(verify_folder(tmp_path / "step-2").files) == {"rank-0.json", "rank-1.json"}
    temp = begin_folder(tmp_path / "step-3")
    abandon_folder(temp)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


@pytest.mark.fault(23)
def test_deleted_folder_is_an_error_that_names_it(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    write_checkpoint(directory, 1, payload(1))
    shutil.rmtree(directory)
    with pytest.raises(StorageError, match=r"run/step-2.*No such file"):
        write_checkpoint(directory, 2, payload(2))
    assert not directory.exists()


@pytest.fixture
def read_only_folder():
    """A folder that this process cannot write, also when the tests run as root."""
    base = Path(tempfile.mkdtemp())
    folder = base / "read-only"
    folder.mkdir()
    base.chmod(0o755)
    folder.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    yield folder
    if is_root:
        os.seteuid(0)
    folder.chmod(0o755)
    shutil.rmtree(base)


@pytest.mark.fault(22)
def test_read_only_folder_is_refused_at_the_start(read_only_folder):
    with pytest.raises(StorageError, match=r"read-only: cannot write: Permission denied .free"):
        prepare_directory(read_only_folder)
    with pytest.raises(StorageError, match="Permission denied"):
        write_checkpoint(read_only_folder, 1, payload(1))
    with pytest.raises(StorageError, match="Permission denied"), atomic_file(read_only_folder / "x.pth") as temp:
        temp.write_bytes(b"x")


def test_writable_folder_is_made_and_left_empty(tmp_path):
    prepare_directory(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_prune_keeps_the_newest_by_number_and_what_is_protected(tmp_path):
    for step in (9, 10, 100, 2):
        write_checkpoint(tmp_path, step, payload(step))
    (tmp_path / "step-1").mkdir()
    removed = prune(tmp_path, keep=2, protect=[tmp_path / "step-2"])
    assert [path.name for path in removed] == ["step-9"]
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "step-2", "step-10", "step-100"}
    assert prune(tmp_path, keep=0) == []


def test_sweep_leaves_everything_else_alone(tmp_path):
    write_checkpoint(tmp_path, 1, payload(1))
    (tmp_path / ".step-9.tmp-123").mkdir()
    (tmp_path / ".step-9.tmp-123" / "x").write_text("x")
    (tmp_path / ".step-8.doomed-5").mkdir()
    (tmp_path / ".step-notes").mkdir()
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", ".step-notes"}


def test_atomic_file_replaces_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "x.bin"
    with atomic_file(path) as temp:
        temp.write_bytes(b"old")
    with pytest.raises(TypeError), atomic_file(path) as temp:
        temp.write_bytes(b"half") + None
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_atomic_file_follows_a_link(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with atomic_file(tmp_path / "link") as temp:
        temp.write_bytes(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_atomic_file_refuses_devices_and_folders(tmp_path):
    for path in (Path("/dev/full"), tmp_path):
        with pytest.raises(StorageError, match="not a regular file"), atomic_file(path):
            pass

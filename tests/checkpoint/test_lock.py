"""One run per folder; a dead owner's lock is taken over."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from trainer.checkpoint.lock import LOCK_NAME, RunLock
from trainer.errors import ConfigError, StorageError


def fork_holder(directory, also=lambda: None):
    """Fork a process that takes the lock, runs `also` and waits to be killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            RunLock(directory).acquire()
            also()
            os.write(writer, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    return pid


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.fault(58)
def test_second_run_is_refused_and_told_the_owner(tmp_path):
    pid = fork_holder(tmp_path)
    try:
        with pytest.raises(ConfigError, match=rf"another run.*host \S+, pid {pid}, start \d{{4}}-") as caught:
            RunLock(tmp_path).acquire()
        assert caught.value.exit_code == 2
    finally:
        kill(pid)


@pytest.mark.fault(58)
def test_lock_of_a_killed_run_is_taken_over(tmp_path):
    kill(fork_holder(tmp_path))
    with RunLock(tmp_path):
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    assert (tmp_path / LOCK_NAME).read_text() == ""


@pytest.mark.fault(58)
def test_surviving_child_of_a_killed_run_does_not_hold_the_lock(tmp_path):
    def spawn_child():
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)

    kill(fork_holder(tmp_path, also=spawn_child))
    with RunLock(tmp_path):
        pass


def test_folder_is_made_and_lock_can_be_taken_again(tmp_path):
    lock = RunLock(tmp_path / "new")
    for _ in range(2):
        lock.acquire()
        lock.release()
    lock.release()


def test_unwritable_folder_is_a_storage_error():
    with pytest.raises(StorageError):
        RunLock(Path("/proc/nope")).acquire()

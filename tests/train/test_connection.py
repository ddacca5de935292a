"""What helps when processes do not find each other."""

from __future__ import annotations

import pytest

from trainer.errors import DistributedError
from trainer.train.connection import connection_errors, remedy


@pytest.mark.fault(61)
def test_the_network_of_gpus_has_a_switch():
    assert "NCCL_IB_DISABLE=1" in remedy("nccl", "12.4")
    assert "12.0" not in remedy("nccl", "12.4")


@pytest.mark.fault(61)
def test_the_cuda_that_hangs_is_named():
    text = remedy("nccl", "12.0")
    assert text.startswith("this PyTorch is built for CUDA 12.0")
    assert "NCCL_IB_DISABLE=1" in text


def test_processes_on_cpus_are_told_about_their_meeting_point():
    assert "MASTER_ADDR" in remedy("gloo", None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1",
            "connection to another process",
        ),
        ("NCCL error in: ../ProcessGroupNCCL.cpp:3690, remote process exited", "connection to another process"),
        ("The server socket has failed to listen on any local network address. port: 29500, EADDRINUSE", "29500"),
    ],
)
def test_errors_of_libraries_become_one_line(text, words):
    with pytest.raises(DistributedError, match=words), connection_errors():
        raise RuntimeError(text)


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="shape"), connection_errors():
        raise RuntimeError("shape mismatch")

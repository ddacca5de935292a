"""Failpoints fail at the armed passage only."""

import pytest

from trainer.checkpoint.failpoints import arm, failpoint
from trainer.errors import ConfigError


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    arm("")


def test_nothing_happens_unless_armed():
    failpoint("half")


def test_only_the_named_passage_fails():
    arm("half:2:enospc,manifest:1:eio")
    failpoint("half")
    with pytest.raises(OSError, match="No space left"):
        failpoint("half")
    failpoint("half")
    with pytest.raises(OSError, match="Input/output error"):
        failpoint("manifest")


@pytest.mark.parametrize("spec", ["half", "half:x", "half:0", "half:1:explode", ":1"])
def test_malformed_text_is_refused(spec):
    with pytest.raises(ConfigError, match="failpoint: malformed"):
        arm(spec)

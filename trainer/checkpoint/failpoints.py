"""Named points at which a test can make the process die or an operation fail. They cost a dictionary look-up."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass

from trainer.errors import ConfigError

__all__ = ["arm", "failpoint"]

_ACTIONS = ("kill", "enospc", "eio", "sleep")
_SLEEP_S = 3600.0


@dataclass(frozen=True)
class _Failure:
    occurrence: int
    action: str


_armed: dict[str, _Failure] = {}
_passed: Counter[str] = Counter()


def arm(spec: str) -> None:
    """Replace all armed failures by those of `spec`, and count passages anew.

    Args:
        spec: `name:k[:action]`, several separated by commas; the k-th passage (from 1) of the point fails.
            Actions: kill (SIGKILL to this process, the default), enospc, eio (an OSError), sleep (for an hour).
            An empty text disarms.

    Raises:
        ConfigError: if the text has another form.
    """
    _armed.clear()
    _passed.clear()
    for part in filter(None, spec.split(",")):
        name, _, rest = part.partition(":")
        occurrence, _, action = rest.partition(":")
        action = action or "kill"
        if not name or not occurrence.isdigit() or int(occurrence) < 1 or action not in _ACTIONS:
            raise ConfigError("failpoint", "malformed", found=part, rule=f"name:k[:{'|'.join(_ACTIONS)}]")
        _armed[name] = _Failure(int(occurrence), action)


def failpoint(name: str) -> None:
    """Pass the point `name`: does nothing unless it is armed for this passage.

    Raises:
        OSError: with ENOSPC or EIO, if that is the armed action.
    """
    failure = _armed.get(name)
    if failure is None:
        return
    _passed[name] += 1
    if _passed[name] != failure.occurrence:
        return
    if failure.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif failure.action == "sleep":
        time.sleep(_SLEEP_S)
    else:
        code = errno.ENOSPC if failure.action == "enospc" else errno.EIO
        raise OSError(code, os.strerror(code))

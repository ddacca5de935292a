"""Logging: one logger tree, messages once, secrets masked, only rank 0 speaks below WARNING."""

from __future__ import annotations

import logging
import re
import sys

__all__ = ["get_logger", "log_once", "mask_secrets", "set_up_logging"]

_SECRET_KEY = re.compile(r"(key|key_id|secret|token|password|passwd|credential)s?$", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(\w+://)[^/\s:@]+:[^/\s@]+@")
_URL_SIGNATURE = re.compile(r"([?&][^=&\s]*(?:signature|credential|secret|token|key|sig)=)[^&\s]+", re.IGNORECASE)
# Names that end like a secret but hold none: token counts and column names.
_NOT_SECRET = re.compile(
    r"(custom_text_key|multi_column_keys|conversation_key|conversation_sender_key|endoftext_token|max_tokens|tokens)$"
)
_seen: set[str] = set()


def get_logger(name: str) -> logging.Logger:
    """Logger of one of our modules; call with `__name__`."""
    return logging.getLogger(name)


def log_once(logger: logging.Logger, message: str, *args: object) -> None:
    """Log `message % args` at INFO the first time this process sees it."""
    text = message % args if args else message
    if text not in _seen:
        _seen.add(text)
        logger.info("%s", text)


def mask_secrets(value: object, key: str = "") -> object:
    """Copy of a nested config in which every secret is replaced by `***`.

    A value is a secret if its key ends in key, secret, token, password or credential. Of a URL, a user and password
    are replaced, and values of its query under such names, as in signed links.
    """
    if isinstance(value, dict):
        return {k: mask_secrets(v, str(k)) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mask_secrets(v, key) for v in value)
    if isinstance(value, str):
        if _SECRET_KEY.search(key) and not _NOT_SECRET.search(key) and value:
            return "***"
        return _mask_urls(value)
    return value


def _mask_urls(text: str) -> str:
    return _URL_SIGNATURE.sub(r"\1***", _URL_PASSWORD.sub(r"\1***@", text))


class _RankFilter(logging.Filter):
    """Lets only rank 0 log below WARNING, so that a run on many GPUs reads like a run on one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = _mask_urls(str(record.msg))
        return self._rank == 0 or record.levelno >= logging.WARNING


def set_up_logging(rank: int = 0, level: int = logging.INFO) -> None:
    """Send our log lines to stderr. Call once, from a program's entry point, with the process's global rank."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname).1s %(message)s"))
    handler.addFilter(_RankFilter(rank))
    root = logging.getLogger("trainer")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False

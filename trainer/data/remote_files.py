"""Source files on S3 or any other storage that fsspec knows, read in place with the interface of local ones."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from trainer.errors import DataError, StorageError
from trainer.logs import mask_secrets

__all__ = [
    "RemoteFile",
    "SourcePath",
    "expand_remote",
    "is_remote",
    "open_filesystem",
    "secret_texts",
    "without_secrets",
]

_BUFFER_BYTES = 1 << 22
_TAGS = ("ETag", "etag", "sha256", "blob_id", "md5Hash", "LastModified", "last_modified", "mtime")
_FIX = "check the name, data.source_dataset_params.storage_options and the network"


def is_remote(name: str | None) -> bool:
    """Whether a path names a remote storage, as `s3://bucket/file` does."""
    return name is not None and "://" in name


class FileStatus(NamedTuple):
    """What is known of a remote file."""

    st_size: int
    tag: str
    """Changes when the content does: an ETag, a checksum or a time."""


@dataclass(frozen=True)
class RemoteFile:
    """A file behind a URL, with that part of pathlib's interface which readers need. It travels to other processes."""

    url: str
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    """Options of its fsspec file system; may hold secrets."""

    def __str__(self) -> str:
        return str(mask_secrets(self.url))

    @property
    def name(self) -> str:
        """Last part of the URL, without a query."""
        return PurePosixPath(self.url.partition("?")[0]).name

    @property
    def suffix(self) -> str:
        """Ending of the name."""
        return PurePosixPath(self.name).suffix

    def stat(self) -> FileStatus:
        """Size and tag, asked anew; DataError if the file is not there or cannot be reached."""
        files, path = open_filesystem(self.url, self.options, "data.source")
        with _named(self):
            files.invalidate_cache()
            info = files.info(path)
            tag = next((str(info[key]) for key in _TAGS if info.get(key)), "")
            return FileStatus(int(info.get("size") or 0), tag)

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """The file for reading; whatever goes wrong is an OSError without secrets."""
        assert mode == "rb"
        return io.BufferedReader(_RemoteStream(self), _BUFFER_BYTES)

    def read_bytes(self) -> bytes:
        """All of it."""
        with self.open() as stream:
            return stream.read()


SourcePath = Path | RemoteFile


class _RemoteStream(io.RawIOBase):
    """Turns the errors of storage libraries, each of which has its own, into OSError."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        with self._plain_errors():
            files, path = open_filesystem(file.url, file.options, "data.source")
            self._stream: Any = files.open(path, "rb", block_size=_BUFFER_BYTES)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with self._plain_errors():
            return int(self._stream.seek(offset, whence))

    def readinto(self, buffer: Any) -> int:
        with self._plain_errors():
            content = self._stream.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        if not self.closed and hasattr(self, "_stream"):
            self._stream.close()
        super().close()

    @contextlib.contextmanager
    def _plain_errors(self) -> Iterator[None]:
        try:
            yield
        # Every storage library has errors of its own.
        except Exception as error:
            raise OSError(without_secrets(error, self._file.options)) from error


def open_filesystem(url: str, options: dict[str, Any], setting: str) -> tuple[Any, str]:
    """The file system of fsspec behind `url`, and the path there.

    Raises:
        StorageError: no library for this protocol is installed.
    """
    protocol = url.partition("://")[0]
    try:
        import fsspec

        files = fsspec.filesystem(protocol, **options)
    except (ImportError, ValueError) as error:
        shown = mask_secrets(url)
        raise StorageError(setting, f"{shown}: {error}", fix=f"pip install {protocol}fs") from error
    return files, str(files._strip_protocol(url))


def expand_remote(url: str, options: dict[str, Any]) -> list[RemoteFile]:
    """The file of a URL, the files below a folder, or those that a pattern matches; sorted, [] if there are none.

    Raises:
        DataError: the storage cannot be reached, or refuses.
    """
    files, path = open_filesystem(url, options, "data.source")
    with _named(RemoteFile(url, options)):
        files.invalidate_cache()
        if any(sign in path for sign in "*[") and not files.exists(path):
            found = files.glob(path)
        else:
            found = [path] if files.isfile(path) else files.find(path)
    return [RemoteFile(url if name == path else str(files.unstrip_protocol(name)), options) for name in sorted(found)]


def secret_texts(options: Any) -> Iterator[str]:
    """Every text in nested options but URLs."""
    if isinstance(options, dict):
        for inner in options.values():
            yield from secret_texts(inner)
    elif isinstance(options, list | tuple):
        for inner in options:
            yield from secret_texts(inner)
    elif isinstance(options, str) and options and "://" not in options:
        yield options


def without_secrets(error: BaseException, options: dict[str, Any]) -> str:
    """An error in words in which no text of `options` is left."""
    shown = str(mask_secrets(f"{type(error).__name__}: {error}"))
    return functools.reduce(lambda text, secret: text.replace(secret, "***"), secret_texts(options), shown)


@contextlib.contextmanager
def _named(file: RemoteFile) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(file, "does not exist", fix=_FIX) from error
    # Every storage library has errors of its own.
    except Exception as error:
        raise DataError(file, f"cannot be read ({without_secrets(error, file.options)})", fix=_FIX) from error

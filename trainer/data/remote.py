"""A data_path on S3 or another remote storage: prepared locally, uploaded whole, and copied to each machine once.

The manifest goes up last and is removed first, so a data set with a manifest is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from trainer.config.schema import DataConfig
from trainer.data.manifest import MANIFEST_NAME, read_manifest
from trainer.data.remote_files import open_filesystem, without_secrets
from trainer.errors import DataError, StorageError
from trainer.logs import get_logger, mask_secrets

__all__ = ["RemoteFolder"]

_CACHE = Path(".cache", "rwkv7-trainer", "data")

logger = get_logger(__name__)


class RemoteFolder:
    """The folder behind a `data_path` such as s3://bucket/folder, with a local copy.

    Args:
        data: `data_path` and `data_path_storage_options`.

    Raises:
        StorageError: no library for this protocol is installed.
    """

    def __init__(self, data: DataConfig) -> None:
        url = str(data.data_path)
        options = data.data_path_storage_options or {}
        self.url = str(mask_secrets(url))
        self._options = options
        self._path = url.partition("://")[2].rstrip("/")
        # Another endpoint may have a bucket of the same name.
        identity = f"{url} {options.get('endpoint_url')} {options.get('client_kwargs', {}).get('endpoint_url')}"
        self.local = Path.home() / _CACHE / hashlib.sha256(identity.encode()).hexdigest()[:16] / "data"
        """The local copy."""
        self._files = open_filesystem(url, {**options, "skip_instance_cache": True}, "data.data_path")[0]

    def fetch(self) -> None:
        """Bring the local copy to the remote state, if there is a whole data set there.

        Raises:
            StorageError: the storage cannot be reached, or refuses.
            DataError: the remote manifest is damaged.
        """
        with self._named("read"):
            text = self._remote_manifest()
        if text is None or self._is_copied(text):
            return
        try:
            files = json.loads(text)["files"]
            names = [name for name in files if not Path(name).is_absolute() and ".." not in Path(name).parts]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self.url}/{MANIFEST_NAME}", f"is damaged ({error})") from error
        logger.info("data: copying %s, %.1f MB", self.url, sum(files[name]["bytes"] for name in names) / 1e6)
        temporary = self.local.with_name("data.fetch")
        shutil.rmtree(temporary, ignore_errors=True)
        with self._named("copied"):
            for name in names:
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{self._path}/{name}", str(temporary / name))
            (temporary / MANIFEST_NAME).write_text(text, "utf-8")
            shutil.rmtree(self.local, ignore_errors=True)
            temporary.rename(self.local)

    def is_current(self) -> bool:
        """Whether the remote data set is the local one."""
        with self._named("read"):
            text = self._remote_manifest()
        return text is not None and self._is_copied(text)

    def upload(self) -> None:
        """Replace the remote data set by the local copy.

        Raises:
            StorageError: the storage cannot be reached, or refuses.
        """
        manifest = read_manifest(self.local)
        assert manifest is not None
        logger.info("data: uploading to %s", self.url)
        with self._named("written"):
            target = f"{self._path}/{MANIFEST_NAME}"
            if self._files.exists(target):
                self._files.rm_file(target)
            for name in manifest.files:
                self._files.put_file(str(self.local / name), f"{self._path}/{name}")
            self._files.put_file(str(self.local / MANIFEST_NAME), target)

    def _remote_manifest(self) -> str | None:
        try:
            content: bytes = self._files.cat_file(f"{self._path}/{MANIFEST_NAME}")
        except FileNotFoundError:
            return None
        return content.decode()

    def _is_copied(self, text: str) -> bool:
        file = self.local / MANIFEST_NAME
        return file.is_file() and file.read_text("utf-8") == text

    @contextlib.contextmanager
    def _named(self, done: str) -> Iterator[None]:
        try:
            yield
        # Every storage library has errors of its own.
        except Exception as error:
            problem = f"{self.url} cannot be {done} ({without_secrets(error, self._options)})"
            fix = "check the bucket, data.data_path_storage_options and the network"
            raise StorageError("data.data_path", problem, fix=fix) from error

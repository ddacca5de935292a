"""Several sources in one data set: which settings each has, and how often its documents are taken."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.fields import accepts, describe_type, settings
from trainer.config.schema import DataConfig
from trainer.config.yaml_files import read_yaml
from trainer.data.sampler import keyed_permutation
from trainer.errors import ConfigError
from trainer.logs import get_logger

__all__ = ["SourceSettings", "document_passes", "read_datapack", "source_settings", "source_epochs"]

_AMOUNTS = ("epochs", "tokens", "weight")
_MANY_EPOCHS = 4
# Keys of a datapack file that shaped what is done at run time here, or did nothing there.
_DATAPACK_IGNORED = {"batchsize", "packing_batchsize", "mixed_batch_percentage", "mixing_mode", "skip_datapath_setup"}
_IS_SHARED = {
    "data_path", "data_path_storage_options", "tokenizer", "autoTokenizer", "world_add_endoftext_token", "append_end_of_document",
    "num_proc", "batching", "chunks_per_step", "streaming", "streaming_shuffle_buffer", "skip_datapath_setup", "sources", "datapack_config_path",
    "sort_by_length", "sort_asc", "reverse_train_dataset_before_save", "packing_enable", "packing_batchsize",
    "packing_chunksize", "packing_min_ctx_len", "packing_in_sequence", "dataloader_shuffle_training",
    "dataloader_prefetch_factor", "dataloader_pin_memory", "dataloader_swap_train_test_split",
    "skip_batches",
}  # fmt: skip

logger = get_logger(__name__)


@dataclass(frozen=True)
class SourceSettings:
    """One source of a mixture."""

    name: str
    """Kept in the manifest, for losses per source."""
    data: DataConfig
    """All settings of this source."""
    epochs: float | None = None
    """Passes over its training documents; a fraction takes a part of them."""
    tokens: float | None = None
    """Training tokens to take."""
    weight: float | None = None
    """Share of all training tokens, relative to the other weights."""


def source_settings(data: DataConfig) -> list[SourceSettings]:
    """The sources of a config; one without a mixture has one.

    Raises:
        ConfigError: an entry of `data.sources` or of the datapack file is malformed.
    """
    if data.datapack_config_path is not None:
        data = read_datapack(data)
    if data.sources is None:
        return [SourceSettings(data.source or "", data)]
    if data.source is not None:
        raise ConfigError("data.source", "is given beside data.sources", fix="make it an entry of data.sources")
    if not data.sources:
        raise ConfigError("data.sources", "is empty", rule="one entry for each source")
    found = [_entry(data, index, entry) for index, entry in enumerate(data.sources)]
    names = [source.name for source in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError("data.sources", f"two entries are named {twice}", fix="give each its own name")
    weighted = [source for source in found if source.weight is not None]
    if weighted and len(weighted) != len(found):
        other = next(source.name for source in found if source.weight is None)
        raise ConfigError(
            "data.sources", f"{other} has no weight, but others do", fix="give all of them a weight, or none"
        )
    return found


def _entry(data: DataConfig, index: int, entry: dict[str, Any]) -> SourceSettings:
    where = f"data.sources[{index}]"
    if not isinstance(entry, dict):
        raise ConfigError(where, "is no mapping", found=str(entry))
    changes = dict(entry)
    name = str(changes.pop("name", None) or changes.get("source_data_dir") or changes.get("source"))
    amounts = {key: changes.pop(key) for key in _AMOUNTS if changes.get(key) is not None}
    if len(amounts) > 1:
        raise ConfigError(where, f"has {' and '.join(amounts)}", rule="at most one of epochs, tokens, weight")
    for key, value in amounts.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{where}.{key}", "out of range", found=str(value), rule="a number above 0")
    for key, value in changes.items():
        setting = settings().get(f"data.{key}")
        if setting is None or key in _IS_SHARED:
            problem = "is shared by all sources" if setting else "is no setting of a source"
            raise ConfigError(f"{where}.{key}", problem, fix="move it to data:" if setting else "remove it")
        if not accepts(setting.annotation, value):
            raise ConfigError(f"{where}.{key}", f"{value!r} is not {describe_type(setting.annotation)}")
    if changes.get("source") is None:
        raise ConfigError(f"{where}.source", "is not set")
    own = dataclasses.replace(data, sources=None, datapack_config_path=None, **changes)
    return SourceSettings(name, own, **amounts)


def read_datapack(data: DataConfig) -> DataConfig:
    """The settings of a datapack file of the older trainer as `data.sources`; values in `data` itself give way.

    Raises:
        ConfigError: the file is malformed, or an entry uses a key that does not exist here.
    """
    path = Path(str(data.datapack_config_path)).expanduser()
    content = read_yaml(str(path)).values
    pack, default, entries = content.get("datapack") or {}, content.get("default") or {}, content.get("dataset")
    if not isinstance(entries, list) or not isinstance(pack, dict) or not isinstance(default, dict):
        raise ConfigError(path, "is no datapack file", rule="a mapping with datapack:, default: and a list dataset:")
    shared: dict[str, Any] = {"data_path": data.data_path or pack.get("data_path")}
    sources = []
    for index, entry in enumerate(entries):
        merged = {**default, **entry}
        merged.pop("data_path_storage_options", None)
        # A ready data set is named by its folder alone.
        ready = merged.pop("data_path", None)
        if merged.get("source") is None and ready is not None:
            merged["source"] = ready
        if "dataset_weight" in merged:
            merged["weight"] = merged.pop("dataset_weight")
        merged = {key: value for key, value in merged.items() if key not in _DATAPACK_IGNORED and value is not None}
        for key in _IS_SHARED & set(merged):
            if shared.setdefault(key, merged[key]) != merged[key]:
                raise ConfigError(f"{path}: dataset[{index}].{key}", "must be equal for all data sets of a pack")
            del merged[key]
        merged.setdefault("name", f"dataset {index}")
        sources.append(merged)
    logger.info("data: %s read as data.sources with %d entries", path, len(sources))
    options = data.data_path_storage_options or pack.get("data_path_storage_options")
    return dataclasses.replace(
        data, datapack_config_path=None, sources=sources, source=None, data_path_storage_options=options, **shared
    )


def source_epochs(sources: list[SourceSettings], num_tokens: list[int]) -> list[float]:
    """How many passes each source gets.

    With weights, every source is used whole at least once: the one that is largest for its weight exactly once,
    the others more often.

    Args:
        sources: the mixture.
        num_tokens: training tokens of one pass over each.
    """
    if sources[0].weight is not None:
        shares = np.array([source.weight for source in sources], np.float64) / np.array(num_tokens)
        passes = (shares / shares.min()).tolist()
    else:
        passes = [
            source.tokens / total if source.tokens is not None else source.epochs if source.epochs is not None else 1.0
            for source, total in zip(sources, num_tokens, strict=True)
        ]
    for source, number in zip(sources, passes, strict=True):
        if number > _MANY_EPOCHS:
            logger.warning("data: source %s is repeated %.1f times in one epoch", source.name, number)
    return [float(number) for number in passes]


def document_passes(documents: np.ndarray, sizes: np.ndarray, epochs: float, seed: int) -> list[np.ndarray]:
    """The documents of each pass, ascending; the last pass of a broken number takes a seeded part of them.

    Args:
        documents: int64, numbers of one source's training documents.
        sizes: int64, tokens of every document of the source.
        epochs: passes.
        seed: of the part.
    """
    whole, part = divmod(epochs, 1)
    passes = [documents] * int(whole)
    wanted = part * int(sizes[documents].sum())
    # Below one token there is nothing to take: a share such as 3 * (1 / 3) misses a whole pass by rounding only.
    if wanted >= 1:
        order = documents[keyed_permutation(len(documents), seed, 0)]
        before = np.cumsum(sizes[order]) - sizes[order]
        passes.append(np.sort(order[before + sizes[order] / 2 <= wanted]))
    return passes

"""The sources of a data set with their settings, and the recipe: everything that decides what is prepared."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.schema import DataConfig
from trainer.data import encode, formats, sources, tokenizers
from trainer.data.encode import Encoder
from trainer.data.format_choice import find_format, format_settings, given_format
from trainer.data.formats import RecordFormat
from trainer.data.manifest import SourceFile, fingerprint_source
from trainer.data.mixing import SourceSettings, read_datapack, source_settings
from trainer.data.sources import Source, binidx_source, find_source, find_test_source, first_record
from trainer.logs import mask_secrets

__all__ = ["VERSION", "Work", "binidx_work", "encoder_of", "find_work", "has_source", "recipe_of", "tokenizer_of"]

VERSION = 2
"""Raise it when filtering, splitting, shaping or saving change; prepared data sets are then rebuilt."""

_TEST = "test split: "
_SHAPE_SETTINGS = (
    "train_on_end",
    "data_prefix_skip_mask",
    "dataset_offset",
    "dataset_length",
    "text_rechunk_auto",
    "text_rechunk_force",
    "text_rechunk_size",
    "sort_by_length",
    "sort_asc",
    "reverse_train_dataset_before_save",
)


@dataclass(frozen=True)
class Work:
    """A source of the data set together with its settings."""

    settings: SourceSettings
    source: Source
    test: Source | None = None
    """The source's own validation documents."""

    @property
    def data(self) -> DataConfig:
        """All settings of this source."""
        return self.settings.data


def has_source(data: DataConfig) -> bool:
    """Whether the settings name something to build from."""
    return any(value is not None for value in (data.source, data.sources, data.datapack_config_path))


def find_work(data: DataConfig) -> tuple[DataConfig, list[Work]]:
    """The settings that all sources share, and each source."""
    if data.datapack_config_path is not None:
        data = read_datapack(data)
    work = [
        Work(settings, find_source(settings.data), find_test_source(settings.data))
        for settings in source_settings(data)
    ]
    for part in work:
        given_format(part.data)
    return data, work


def binidx_work(data: DataConfig, prefix: Path) -> tuple[DataConfig, list[Work]]:
    """A .bin/.idx pair as the source; its documents are taken as they are."""
    data = dataclasses.replace(data, source="binidx", source_data_dir=str(prefix), append_end_of_document=False)
    return data, [Work(SourceSettings(prefix.name, data), binidx_source(prefix))]


def recipe_of(
    data: DataConfig, work: list[Work] | None, seed: int, known: list[SourceFile]
) -> tuple[dict[str, Any], list[SourceFile]]:
    """Everything that decides the content of the prepared data set, and the source files as they are now."""
    tokenizer = tokenizer_of(data)
    recipe: dict[str, Any] = {
        "tokenizer": tokenizer.name,
        "tokenizer_digest": tokenizer.digest,
        "append_end_of_document": data.append_end_of_document,
    }
    files: list[SourceFile] = []
    if work is not None and len(work) > 1:
        recipe["seed"] = seed
        recipe["sources"] = [part.settings.name for part in work]
        for part in work:
            prefix = f"{part.settings.name}: "
            own = [file.moved(prefix, "") for file in known if file.name.startswith(prefix)]
            own = [file.moved("", prefix) for file in _fingerprint(part, own)]
            files += own
            amounts = {name: getattr(part.settings, name) for name in ("epochs", "tokens", "weight")}
            recipe |= {
                f"{prefix}{key}": value
                for key, value in {**amounts, **_source_recipe(part.data, part, own, seed)}.items()
            }
    else:
        only = work[0] if work else None
        files = [] if only is None else _fingerprint(only, known)
        recipe |= _source_recipe(only.data if only else data, only, files, seed)
    recipe["versions"] = {
        "sources": sources.VERSION,
        "formats": formats.VERSION,
        "tokenizers": tokenizers.VERSION,
        "encode": encode.VERSION,
        "prepare": VERSION,
    }
    return json.loads(json.dumps(recipe)), files


def _fingerprint(part: Work, known: list[SourceFile]) -> list[SourceFile]:
    """Identity of all files of a source; those that validate stand last, under names of their own."""
    files = fingerprint_source(part.source, known)
    if part.test is not None:
        own = [file.moved(_TEST, "") for file in known if file.name.startswith(_TEST)]
        files += [file.moved("", _TEST) for file in fingerprint_source(part.test, own)]
    return files


def _source_recipe(data: DataConfig, part: Work | None, files: list[SourceFile], seed: int) -> dict[str, Any]:
    default = DataConfig()
    recipe: dict[str, Any] = {
        "min_token_size": data.min_token_size,
        "max_token_size": data.max_token_size,
        "test_split": data.test_split,
        "test_split_shuffle": data.test_split_shuffle,
        "seed": seed if data.test_split_shuffle else None,
    }
    recipe |= {name: getattr(data, name) for name in _SHAPE_SETTINGS if getattr(data, name) != getattr(default, name)}
    recipe |= format_settings(data)
    if part is not None and part.test is not None:
        recipe["source_test_split"] = part.test.split
    if part is not None:
        source = part.source
        recipe |= {
            "source": source.hub_name or source.kind,
            "source_dataset_split": source.split,
            # Arguments may hold an access token, and manifests are shared.
            "source_dataset_params": mask_secrets(source.params),
            "source_files": [file.identity for file in files],
        }
    return recipe


def tokenizer_of(data: DataConfig) -> tokenizers.Tokenizer:
    """The tokenizer of the settings."""
    return tokenizers.get_tokenizer(
        data.tokenizer,
        world_add_endoftext_token=data.world_add_endoftext_token,
        auto_tokenizer=data.autoTokenizer,
    )


def encoder_of(part: Work) -> Encoder:
    """How a source's records become tokens; the format is told from its first record, unless it is set."""
    data = part.data
    return Encoder(
        tokenizer=data.tokenizer,
        world_add_endoftext_token=data.world_add_endoftext_token,
        auto_tokenizer=data.autoTokenizer,
        append_end_of_document=data.append_end_of_document,
        record_format=_record_format(part),
        train_on_end=data.train_on_end,
        prefix_skip=data.data_prefix_skip_mask,
    )


def _record_format(part: Work) -> RecordFormat:
    if part.source.kind == "text":
        return formats.TextFormat(part.data.custom_text_key or "text")
    place, record = first_record(part.source)
    if part.source.kind == "binidx":
        return formats.TokenizedFormat()
    return find_format(part.data, record, place)

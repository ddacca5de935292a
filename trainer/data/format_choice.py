"""Which format a source's records have: as the settings say, else told from the first record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.schema import DataConfig
from trainer.data.chat_templates import JinjaTemplate, Template, tokenizer_template
from trainer.data.conversations import ChatFormat, IoPairsFormat, RwkvG1Template, SenderFormat, find_conversation
from trainer.data.formats import (
    MultiColumnFormat,
    PromptCompletionFormat,
    RecordFormat,
    TextFormat,
    TokenizedFormat,
    refuse_escapes,
)
from trainer.errors import ConfigError, DataError
from trainer.logs import get_logger, log_once

__all__ = ["check_templates", "find_format", "format_settings", "given_format"]

logger = get_logger(__name__)

_DEFAULT_COLUMNS = MultiColumnFormat()
_SETTINGS = (
    "custom_text_key",
    "disable_prompt_completion_mask",
    "multi_column_keys",
    "multi_column_prefix",
    "multi_column_suffix",
    "multi_column_train_mask",
    "multi_column_separator",
    "conversation_format",
    "conversation_key",
    "conversation_input_key_prefix_map",
    "conversation_input_key_mask",
    "conversation_input_key_map",
    "conversation_sender_key",
    "conversation_sender_value_map",
    "conversation_sender_mask",
    "conversation_sender_suffix",
    "conversation_end_of_conversation",
    "chat_template",
    "roles_to_train",
    "train_on_end",
    "mask_history",
)


def format_settings(data: DataConfig) -> dict[str, Any]:
    """The settings that decide how a record becomes segments, where they differ from the defaults.

    The text of a template file is part of it, so that an edit leads to a rebuild.
    """
    default = DataConfig()
    settings = {name: getattr(data, name) for name in _SETTINGS if getattr(data, name) != getattr(default, name)}
    if data.chat_template != default.chat_template:
        settings["chat_template"] = [data.chat_template, getattr(_template(data), "source", "")]
    return settings


def given_format(data: DataConfig) -> RecordFormat | None:
    """The format that the settings name, or None: then `find_format` tells it from a record.

    Raises:
        ConfigError: settings of the format are missing or do not fit together.
    """
    check_templates(data)
    if data.custom_text_key is not None:
        return TextFormat(data.custom_text_key)
    if data.conversation_format in ("messages", "sharegpt"):
        return _chat(data, data.conversation_format, data.conversation_key)
    if data.conversation_format == "iopairs":
        if not data.conversation_input_key_prefix_map:
            _refuse_missing("conversation_input_key_prefix_map", "iopairs")
        return IoPairsFormat(
            data.conversation_key,
            data.conversation_input_key_prefix_map or {},
            data.conversation_input_key_mask or {},
            data.conversation_sender_suffix or {},
            data.conversation_end_of_conversation or "",
        )
    if data.conversation_format == "sender":
        for name in ("conversation_sender_key", "conversation_input_key_map"):
            if not getattr(data, name):
                _refuse_missing(name, "sender")
        return SenderFormat(
            data.conversation_key,
            data.conversation_sender_key or "",
            data.conversation_input_key_map or {},
            data.conversation_sender_value_map or {},
            data.conversation_sender_mask or {},
            data.conversation_sender_suffix or {},
            data.conversation_end_of_conversation or "",
        )
    return _multi_column(data) if data.multi_column_keys else None


def find_format(data: DataConfig, record: Mapping[str, Any], where: str) -> RecordFormat:
    """The format of a source whose first record is `record`; the choice is logged.

    Args:
        data: the `data:` settings.
        record: the first record.
        where: the source, for messages.

    Raises:
        ConfigError: settings of the format are missing or do not fit together.
        DataError: the columns are those of no format.
    """
    chosen, why = given_format(data), "as set"
    if chosen is None:
        chosen, why = _detect(data, record), "told from the columns"
    if chosen is None:
        raise DataError(
            where,
            "has no column text, and its columns are those of no other format",
            found=", ".join(map(str, record)) or "no columns",
            rule="text, prompt and completion, instruction and output, messages, conversations, or input_ids",
            fix="set data.custom_text_key to the column that holds the text, or data.multi_column_keys, or "
            "data.conversation_format",
        )
    logger.info("data: format %s, %s", chosen.name, why)
    if isinstance(chosen, MultiColumnFormat) and chosen.has_mask:
        log_once(
            logger,
            "data: prefixes and suffixes are trained only where their column is; the older trainer always trained them",
        )
    return chosen


def check_templates(data: DataConfig) -> None:
    """Refuse template texts with a literal backslash-n.

    Raises:
        ConfigError: names the setting.
    """
    for name in _SETTINGS:
        value = getattr(data, name)
        if not name.endswith(("prefix", "suffix", "separator", "_map", "end_of_conversation")) or value is None:
            continue
        for text in value.values() if isinstance(value, dict) else [value] if isinstance(value, str) else value:
            refuse_escapes(f"data.{name}", str(text))


def _detect(data: DataConfig, record: Mapping[str, Any]) -> RecordFormat | None:
    conversation = find_conversation(record)
    if conversation is not None:
        return _chat(data, conversation[0], data.conversation_key or conversation[1])
    if data.multi_column_keys is None and {"instruction", "output"} <= set(record):
        return _multi_column(data)
    if {"prompt", "completion"} <= set(record):
        return PromptCompletionFormat(train_prompt=data.disable_prompt_completion_mask)
    if "text" not in record and "input_ids" in record:
        masks = (key for key in ("loss_mask", "labels", "attention_mask") if key in record)
        return TokenizedFormat(next(masks, None))
    return TextFormat() if "text" in record else None


def _refuse_missing(name: str, kind: str) -> None:
    raise ConfigError(f"data.{name}", f"is not set, and conversation_format: {kind} needs it")


def _multi_column(data: DataConfig) -> MultiColumnFormat:
    keys = tuple(data.multi_column_keys or _DEFAULT_COLUMNS.keys)
    is_default, num = keys == _DEFAULT_COLUMNS.keys, len(keys)
    lists: dict[str, Any] = {
        "prefix": _DEFAULT_COLUMNS.prefix if is_default else ("",) * num,
        "suffix": ("",) * num,
        "train_mask": _DEFAULT_COLUMNS.train_mask if is_default else (True,) * num,
    }
    for name in lists:
        given = getattr(data, f"multi_column_{name}")
        if given:
            lists[name] = tuple(given)
        if len(lists[name]) != num:
            raise ConfigError(
                f"data.multi_column_{name}",
                f"has {len(lists[name])} entries for {num} columns",
                rule=f"one for each of {', '.join(keys)}",
            )
    return MultiColumnFormat(keys=keys, separator=data.multi_column_separator, **lists)


def _chat(data: DataConfig, kind: str, column: str | None) -> ChatFormat:
    roles = tuple(data.roles_to_train if data.roles_to_train is not None else ["assistant"])
    unknown = sorted(set(roles) - {"system", "user", "assistant", "tool"})
    if unknown:
        raise ConfigError(
            "data.roles_to_train", "has an unknown role", found=unknown[0], rule="of system, user, assistant, tool"
        )
    template = _template(data)
    return ChatFormat(kind, column, template, roles, data.train_on_end, data.mask_history)


def _template(data: DataConfig) -> Template:
    name = data.chat_template
    if name == "rwkv_g1":
        return RwkvG1Template()
    if name == "tokenizer":
        path = Path(data.tokenizer).expanduser()
        if not path.exists():
            raise ConfigError(
                "data.chat_template", f"data.tokenizer {data.tokenizer} brings no chat template", fix="use rwkv_g1"
            )
        return tokenizer_template(path if path.is_dir() else path.parent)
    if name.startswith("jinja:"):
        return JinjaTemplate.from_file(Path(name.removeprefix("jinja:")).expanduser())
    raise ConfigError("data.chat_template", "unknown", found=name, rule="rwkv_g1, tokenizer, or jinja:FILE")

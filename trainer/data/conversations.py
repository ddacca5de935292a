"""Conversations as segments: chat messages under a template, and the two free forms of the older trainer.

`messages` ({role, content}) and `sharegpt` ({from, value}) name the speakers, so one chat template fits all;
`iopairs` and `sender` spell out every prefix and suffix in the config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.data.chat_templates import Message, RenderedTurn, Template
from trainer.data.formats import RecordFault, Segment, kind_of, text_of

__all__ = ["ChatFormat", "IoPairsFormat", "RwkvG1Template", "SenderFormat", "find_conversation"]

_KEYS = {"messages": ("role", "content"), "sharegpt": ("from", "value")}
_COLUMNS = {
    "messages": ("messages", "conversation", "conversations"),
    "sharegpt": ("conversations", "conversation", "messages"),
}
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
    "developer": "system",
}
_KNOWN_ROLES = ("system", "user", "assistant", "tool")
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")


def find_conversation(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """(format, column) of the first column that holds a list of messages, or None."""
    for column in dict.fromkeys(name for names in _COLUMNS.values() for name in names):
        turns = record.get(column)
        first = turns[0] if isinstance(turns, list) and turns else None
        for name, (role, content) in _KEYS.items():
            if isinstance(first, dict) and role in first and content in first:
                return name, column
    return None


class RwkvG1Template:
    """`User: ...`, `Assistant: ...`, separated by blank lines: the form that released RWKV-7 models were trained on.

    Blank lines inside a user's, system's or tool's text would end the turn, so they become one newline there.
    The answer's text starts with the space after `Assistant:`.
    """

    name = "rwkv_g1"

    def turns(self, messages: Sequence[Message], tools: Any = None) -> list[RenderedTurn]:
        """Each message as its untrained opening, its text, and its end."""
        turns = [self._turn(message) for message in messages]
        if tools:
            listing = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            if messages[0].role == "system":
                turns[0] = turns[0]._replace(body=f"{turns[0].body}\nTools:\n{listing}")
            else:
                turns.insert(0, RenderedTurn(None, "System:", f" Tools:\n{listing}", "\n\n"))
        # The last turn ends with the document.
        return [*turns[:-1], turns[-1]._replace(end="")]

    def _turn(self, message: Message) -> RenderedTurn:
        text = message.content.replace("\r\n", "\n")
        if message.role == "assistant":
            text = text.strip()
            if message.reasoning:
                text = f"<think>\n{message.reasoning.strip()}\n</think>\n{text}"
            if message.tool_calls:
                calls = "\n".join(json.dumps(call, ensure_ascii=False) for call in message.tool_calls)
                text = "\n".join(part for part in (text, f"```json\n{calls}\n```") if part)
            return RenderedTurn(message.number, "Assistant:", f" {text}" if text else "", "\n\n")
        text = _BLANK_LINES.sub("\n", text).strip()
        if message.role == "tool":
            text = f"Function output:\n{text}"
        opening = "System:" if message.role == "system" else "User:"
        return RenderedTurn(message.number, opening, f" {text}" if text else "", "\n\n")


@dataclass(frozen=True)
class ChatFormat:
    """A list of messages with roles, made into text by a chat template.

    A message is trained if its role is in `roles_to_train`, or as its own `train` flag says. Its opening
    (such as `Assistant:`) is not: the reader of the trained model writes that.
    """

    kind: str
    """messages or sharegpt."""
    column: str | None
    """Column with the list; None: the record's one list of messages is found by its usual names."""
    template: Template = field(default_factory=RwkvG1Template)
    roles_to_train: tuple[str, ...] = ("assistant",)
    train_on_end: bool = True
    mask_history: bool = False

    @property
    def name(self) -> str:
        """As shown to the user."""
        return f"{self.kind} (column {self.column}, chat_template {self.template.name})"

    @property
    def columns(self) -> None:
        """None: templates may ask for other columns, such as tools."""
        return

    @property
    def has_mask(self) -> bool:
        """True: openings are untrained."""
        return True

    def segments(self, record: Mapping[str, Any]) -> list[Segment]:
        """Opening, text and end of each turn."""
        messages = self._messages(record)
        learn = {message.number: self._is_trained(message) for message in messages}
        if self.mask_history:
            last = max((index for index, trained in learn.items() if trained), default=None)
            learn = {index: index == last for index in learn}
        segments: list[Segment] = []
        for turn in self.template.turns(messages, record.get("tools")):
            trained = turn.message is not None and learn[turn.message]
            segments += [Segment(turn.opening, False), Segment(turn.body, trained)]
            segments.append(Segment(turn.end, trained and self.train_on_end))
        return segments

    def _is_trained(self, message: Message) -> bool:
        return message.role in self.roles_to_train if message.train is None else message.train

    def _messages(self, record: Mapping[str, Any]) -> list[Message]:
        column = self.column or next((name for name in _COLUMNS[self.kind] if name in record), _COLUMNS[self.kind][0])
        turns = record.get(column)
        if not isinstance(turns, list) or not turns:
            found = "nothing" if column not in record else "an empty list" if turns == [] else kind_of(turns)
            raise RecordFault(f"{column} is no list of messages", found=found)
        messages = [self._message(f"{column}[{index}]", index, turn) for index, turn in enumerate(turns)]
        system = record.get("system")
        if isinstance(system, str) and system and messages[0].role != "system":
            messages.insert(0, Message(-1, "system", system))
        return messages

    def _message(self, place: str, index: int, turn: object) -> Message:
        role_key, content_key = _KEYS[self.kind]
        if not isinstance(turn, dict):
            raise RecordFault(f"{place} is {kind_of(turn)}", rule=f"an object with {role_key} and {content_key}")
        role = turn.get(role_key)
        normal = _ROLES.get(role, role) if isinstance(role, str) else None
        if normal not in _KNOWN_ROLES:
            known = ", ".join((*_KNOWN_ROLES, *_ROLES))
            raise RecordFault(f"{place}.{role_key} is no known role", found=str(role), rule=f"one of {known}")
        train = turn.get("train")
        if train is not None and train not in (True, False):
            raise RecordFault(f"{place}.train is {kind_of(train)}", found=str(train), rule="true or false")
        calls = turn.get("tool_calls") or None
        reasoning = turn.get("reasoning_content") or turn.get("thinking") or ""
        if not isinstance(reasoning, str):
            raise RecordFault(f"{place}.reasoning_content is {kind_of(reasoning)}", rule="a text")
        content = _content(f"{place}.{content_key}", turn.get(content_key, ""), may_be_null=bool(calls))
        return Message(index, normal, content, None if train is None else bool(train), reasoning, calls, turn)


def _content(place: str, content: object, *, may_be_null: bool) -> str:
    """A message's text; lists of parts, as vision chats have them, are joined if all parts are text."""
    if isinstance(content, str):
        return content
    if content is None and may_be_null:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(text_of(part, "text") for part in content)
    rule = "a text, or a list of parts of type text"
    raise RecordFault(f"{place} is {kind_of(content)}", found=str(content)[:60], rule=rule)


def _turns_of(record: Mapping[str, Any], key: str | None) -> list[tuple[str, Mapping[str, Any]]]:
    """Each turn with its name for messages; without `key` the record is the one turn."""
    if key is None:
        return [("record", record)]
    turns = record.get(key)
    if not isinstance(turns, list) or not turns:
        raise RecordFault(f"{key} is no list of turns", found="nothing" if key not in record else kind_of(turns))
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise RecordFault(f"{key}[{index}] is {kind_of(turn)}", rule="an object")
    return [(f"{key}[{index}]", turn) for index, turn in enumerate(turns)]


@dataclass(frozen=True)
class IoPairsFormat:
    """Turns whose keys say who speaks: each key of `prefix`, in the record's order, is one utterance.

    Prefix and suffix are trained if and only if the key is.
    """

    column: str | None
    prefix: Mapping[str, str]
    mask: Mapping[str, bool]
    """Whether a key is trained; a key that is not listed is."""
    suffix: Mapping[str, str]
    end: str = ""
    """Put at the end of the conversation, trained."""

    @property
    def name(self) -> str:
        """As shown to the user."""
        return f"iopairs ({f'column {self.column}, ' if self.column else ''}keys {', '.join(self.prefix)})"

    @property
    def columns(self) -> tuple[str, ...]:
        """The list's column, or the keys."""
        return (self.column,) if self.column else tuple(self.prefix)

    @property
    def has_mask(self) -> bool:
        """Whether a key is untrained."""
        return not all(self.mask.get(key, True) for key in self.prefix)

    def segments(self, record: Mapping[str, Any]) -> list[Segment]:
        """One segment for each utterance."""
        segments: list[Segment] = []
        for _, turn in _turns_of(record, self.column):
            for key in (key for key in turn if key in self.prefix and turn[key] is not None):
                text = self.prefix[key] + text_of(turn, key) + self.suffix.get(key, "")
                segments.append(Segment(text, self.mask.get(key, True)))
        if not segments:
            raise RecordFault(f"has none of the keys {', '.join(self.prefix)}", found=", ".join(record) or "nothing")
        return [*segments, Segment(self.end, True)]


@dataclass(frozen=True)
class SenderFormat:
    """Turns with a field that names the sender. Everything of a turn is trained if and only if its sender is."""

    column: str | None
    sender_key: str
    templates: Mapping[str, str]
    """Key of a turn to the text before its value, in which `{sender}` stands for the shown name."""
    names: Mapping[str, str]
    """Raw sender to shown name; a sender that is not listed is shown as it is."""
    mask: Mapping[str, bool]
    """Raw sender to whether it is trained; one that is not listed is."""
    suffix: Mapping[str, str]
    end: str = ""

    @property
    def name(self) -> str:
        """As shown to the user."""
        place = f"column {self.column}, " if self.column else ""
        return f"sender ({place}sender in {self.sender_key}, text in {', '.join(self.templates)})"

    @property
    def columns(self) -> tuple[str, ...]:
        """The list's column, or the keys."""
        return (self.column,) if self.column else (self.sender_key, *self.templates)

    @property
    def has_mask(self) -> bool:
        """Whether a sender is untrained."""
        return not all(self.mask.values())

    def segments(self, record: Mapping[str, Any]) -> list[Segment]:
        """One segment for each turn."""
        segments: list[Segment] = []
        for place, turn in _turns_of(record, self.column):
            sender = turn.get(self.sender_key)
            if not isinstance(sender, str):
                raise RecordFault(f"{place}.{self.sender_key} is {kind_of(sender)}", rule="the name of a sender")
            keys = [key for key in self.templates if turn.get(key) is not None]
            if not keys:
                raise RecordFault(f"{place} has none of {', '.join(self.templates)}", found=", ".join(map(str, turn)))
            shown = self.names.get(sender, sender)
            text = "".join(self.templates[key].replace("{sender}", shown) + text_of(turn, key) for key in keys)
            segments.append(Segment(text + self.suffix.get(sender, ""), self.mask.get(sender, True)))
        return [*segments, Segment(self.end, True)]

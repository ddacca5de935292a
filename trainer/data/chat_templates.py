"""Chat templates in Jinja, with exact knowledge of which characters of their output each message made.

Two ways lead there. A template with `{% generation %}` blocks marks the answers itself. In any other one, the
template is rendered with one message more each time: what a message adds is its turn, and what the template
adds before an answer when asked to (`add_generation_prompt`) is that turn's opening.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from trainer.data.formats import RecordFault, refuse_escapes
from trainer.errors import ConfigError

if TYPE_CHECKING:
    import jinja2
    from jinja2.nodes import Node
    from jinja2.parser import Parser

__all__ = ["JinjaTemplate", "Message", "RenderedTurn", "Template", "tokenizer_template"]

# Private-use characters mark the output of {% generation %} blocks; a message that holds them is refused.
_OPEN, _CLOSE = "\ue000\ue000", "\ue001\ue001"
_EXPRESSIONS = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", re.DOTALL)


class Message(NamedTuple):
    """One message of a conversation."""

    number: int
    """Place in the record's list; -1 for a system text from a column of its own."""
    role: str
    """system, user, assistant or tool."""
    content: str
    train: bool | None = None
    """The message's own flag, if it has one."""
    reasoning: str = ""
    tool_calls: list[Any] | None = None
    raw: dict[str, Any] | None = None
    """The record's entry; a Jinja template sees its other keys too."""


class RenderedTurn(NamedTuple):
    """A turn as text: opening + body + end."""

    message: int | None
    """`Message.number`; None: text of the template's own."""
    opening: str
    """Never trained: whoever uses the trained model writes it."""
    body: str
    end: str
    """Trained if the body is, unless `train_on_end` is off."""


class Template(Protocol):
    """Makes text of messages."""

    @property
    def name(self) -> str:
        """As shown to the user."""

    def turns(self, messages: Sequence[Message], tools: Any = None) -> list[RenderedTurn]:
        """The whole text, cut into turns. RecordFault if the template refuses the messages."""


@dataclass(frozen=True)
class JinjaTemplate:
    """A chat template in Jinja, run in a sandbox.

    Args:
        name: as shown to the user.
        source: the template.
        special_tokens: names that the template may use, such as bos_token and eos_token.
    """

    name: str
    source: str
    special_tokens: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_file(cls, path: Path) -> JinjaTemplate:
        """Read and compile a template file.

        Raises:
            ConfigError: it cannot be read or compiled, or holds a literal backslash-n outside of expressions.
        """
        try:
            source = path.read_text("utf-8").removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("data.chat_template", f"{path} cannot be read ({error})") from error
        template = cls(f"jinja:{path}", source)
        template.check()
        return template

    def check(self) -> None:
        """Compile the template. ConfigError if that fails, or if its plain text holds a literal backslash-n."""
        import jinja2

        try:
            _compile(self.source)
        except jinja2.TemplateSyntaxError as error:
            problem = f"{self.name} line {error.lineno} is no valid Jinja ({error.message})"
            raise ConfigError("data.chat_template", problem) from error
        refuse_escapes(f"data.chat_template {self.name}", _EXPRESSIONS.sub("", self.source))

    def turns(self, messages: Sequence[Message], tools: Any = None) -> list[RenderedTurn]:
        """The whole text, cut into turns."""
        if re.search(r"\{%-?\s*generation\s*-?%\}", self.source):
            return self._marked_turns(messages, tools)
        return self._grown_turns(messages, tools)

    def _marked_turns(self, messages: Sequence[Message], tools: Any) -> list[RenderedTurn]:
        if any(mark in message.content for message in messages for mark in (_OPEN, _CLOSE)):
            raise RecordFault("a message holds the characters U+E000 or U+E001 twice in a row")
        parts = re.split(f"{_OPEN}(.*?){_CLOSE}", self._render(messages, tools), flags=re.DOTALL)
        answers = [message.number for message in messages if message.role == "assistant"]
        if len(parts) // 2 != len(answers):
            raise RecordFault(
                f"{self.name} marks {len(parts) // 2} answers with generation blocks",
                rule=f"one of {len(answers)} each",
            )
        turns = [
            RenderedTurn(index, parts[2 * number], parts[2 * number + 1], "") for number, index in enumerate(answers)
        ]
        return [*turns, RenderedTurn(None, parts[-1], "", "")]

    def _grown_turns(self, messages: Sequence[Message], tools: Any) -> list[RenderedTurn]:
        turns: list[RenderedTurn] = []
        text = ""
        for number, message in enumerate(messages, 1):
            # Some templates refuse a conversation without a user's message: that text goes to the next turn.
            if number < len(messages) and not any(m.role == "user" for m in messages[:number]):
                continue
            opening = text
            if message.role == "assistant":
                opening = self._render(messages[: number - 1], tools, prompt=True)
                self._must_continue(text, opening, message)
            grown = self._render(messages[:number], tools)
            self._must_continue(opening, grown, message)
            body, end = _split_end(grown[len(opening) :], message.content)
            turns.append(RenderedTurn(message.number, opening[len(text) :], body, end))
            text = grown
        return turns

    def _must_continue(self, text: str, grown: str, message: Message) -> None:
        if not grown.startswith(text):
            raise RecordFault(
                f"{self.name} changes earlier text when message {message.number} is added, so its tokens cannot be told",
                fix="mark the answers in the template with {% generation %} and {% endgeneration %}",
            )

    def _render(self, messages: Sequence[Message], tools: Any, *, prompt: bool = False) -> str:
        import jinja2

        entries = [{**(message.raw or {}), "role": message.role, "content": message.content} for message in messages]
        try:
            return _compile(self.source).render(
                messages=entries, tools=tools, add_generation_prompt=prompt, **dict(self.special_tokens)
            )
        except jinja2.TemplateError as error:
            raise RecordFault(f"{self.name} refuses the conversation ({error.message})") from error
        # A template is a program: whatever it trips over belongs to this record.
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise RecordFault(f"{self.name} fails on the conversation ({error})") from error


def _split_end(added: str, content: str) -> tuple[str, str]:
    """What an answer added, cut behind its content; an end that cannot be told apart is part of the body."""
    stripped = content.strip()
    at = added.rfind(stripped) if stripped else -1
    return (added, "") if at < 0 else (added[: at + len(stripped)], added[at + len(stripped) :])


def tokenizer_template(folder: Path) -> JinjaTemplate:
    """The chat template that a Hugging Face tokenizer brings, with its special tokens.

    Raises:
        ConfigError: the folder has none, or it cannot be read.
    """
    config: dict[str, Any] = {}
    try:
        path = folder / "tokenizer_config.json"
        if path.is_file():
            config = json.loads(path.read_text("utf-8"))
        file = folder / "chat_template.jinja"
        source = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
    except (OSError, ValueError) as error:
        raise ConfigError("data.chat_template", f"{folder} cannot be read ({error})") from error
    if isinstance(source, list):
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    if not isinstance(source, str):
        raise ConfigError(
            "data.chat_template", f"the tokenizer {folder} brings no chat template", fix="use rwkv_g1 or jinja:FILE"
        )
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        tokens[name] = str(value.get("content", "") if isinstance(value, dict) else value or "")
    template = JinjaTemplate("tokenizer", source, tuple(tokens.items()))
    template.check()
    return template


@functools.cache
def _compile(source: str) -> jinja2.Template:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}...{% endgeneration %}`: an answer."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> Node | list[Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        @staticmethod
        def _mark(caller: Any) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    # Templates print the date; a fixed one keeps the data a function of its source.
    environment.globals["strftime_now"] = lambda form: datetime(2025, 1, 1).strftime(form)
    return environment.from_string(source)

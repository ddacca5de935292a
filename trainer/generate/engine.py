"""Text generation: reads a prompt of any length in chunks, then writes token by token, at constant memory.

    generator = load_generator(Path("model.pth"))
    generator.read("Once upon a time")
    for piece in generator.stream(StreamOptions(max_tokens=100, sampling=Sampling())):
        ...

The state is a value: `generator.snapshot` can be kept, saved, and set again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from trainer.checkpoint.adapter import MergedWeights, base_fingerprint, check_adapter, read_adapter
from trainer.checkpoint.read import read_weights
from trainer.checkpoint.write import ADAPTER_FILE
from trainer.data.tokenizers import StreamDecoder, Tokenizer, built_in_tokenizer, get_tokenizer, holds_tokenizer
from trainer.errors import ConfigError, DataError, NonFiniteError
from trainer.generate.sampling import Sampler, Sampling
from trainer.generate.state_file import Snapshot, load_state
from trainer.model.naming import shape_from_weights
from trainer.model.rwkv7 import RWKV7
from trainer.ops.wkv7 import choose_backend

__all__ = [
    "CHAT_STOP",
    "Generator",
    "NonFiniteLogitsError",
    "StreamOptions",
    "chat_turn",
    "load_generator",
    "load_model",
    "pick_device",
    "pick_dtype",
    "pick_tokenizer",
    "read_prompt",
    "token_model",
]

CHAT_STOP = "\n\nUser:"
"""What a model writes after its own turn of a chat."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_START_OF_TEXT = 0


class NonFiniteLogitsError(NonFiniteError):
    """The model's output is NaN or infinite. Programmes that generate text end with exit code 1."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """When to stop, and how to choose tokens until then."""

    max_tokens: int
    """Most tokens that are written."""
    sampling: Sampling = field(default_factory=Sampling)
    """How each is chosen."""
    seed: int | None = None
    """The same seed gives the same text; None = another one each time."""
    stop: tuple[str, ...] = ()
    """Texts that end the output, and are not part of it."""
    stop_token: int | None = 0
    """Token that ends the output; 0 ends a document. None = go on."""

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise ConfigError("--tokens", "out of range", found=self.max_tokens, rule="at least 0")
        if "" in self.stop:
            raise ConfigError("--stop", "is empty")


def chat_turn(text: str, *, is_first: bool) -> str:
    """A user's turn and the beginning of the answer, as RWKV models were trained on chats.

    A blank line separates turns, so there are none inside one. Nothing follows the last colon: the first
    token of the answer carries its own space.
    """
    cleaned = re.sub(r"\n{2,}", "\n", text.replace("\r\n", "\n")).strip()
    separator = "" if is_first else "\n\n"
    return f"{separator}User: {cleaned}\n\nAssistant:"


def read_prompt(text: str | None, file: Path | None) -> str:
    """The text of `file`, to its last byte, or `text`; "" without either.

    Raises:
        DataError: if the file cannot be read or is not UTF-8.
    """
    if file is None:
        return text or ""
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as err:
        raise DataError(file, f"cannot be read: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise DataError(file, f"is not UTF-8 at byte {err.start}", fix="convert it to UTF-8") from err


def pick_device(name: str) -> torch.device:
    """The device of `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if not match:
        raise ConfigError("--device", "not understood", found=name, rule="auto, cpu, cuda or cuda:N")
    if name != "cpu" and int(match[1] or 0) >= torch.cuda.device_count():
        found = f"{torch.cuda.device_count()} GPU(s)"
        raise ConfigError("--device", f"{name} is not there", found=found, fix="--device cpu")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of `fp32`, `bf16`, or `auto`: bf16 on GPUs that have it, else fp32."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if name not in _DTYPES:
        raise ConfigError("--dtype", "not understood", found=name, rule="auto, fp32 or bf16")
    return _DTYPES[name]


def pick_tokenizer(name: str, vocab_size: int, model: Path | None = None) -> Tokenizer:
    """The tokenizer of `world`, `byte`, a path, or `auto`.

    `auto` is the one that the model's folder brings, or else the one that models of this vocabulary are trained with.
    """
    if name == "auto" and model is not None and holds_tokenizer(model):
        name = str(model)
    if name == "auto":
        found = built_in_tokenizer(vocab_size)
        if found is None:
            raise ConfigError(
                "--tokenizer",
                f"a vocabulary of {vocab_size} tells no tokenizer",
                fix="give one: world, byte, or the path of a tokenizer.json",
            )
        name = found
    return get_tokenizer(name)


def load_generator(
    path: Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: str = "auto",
    kernel: str = "auto",
    adapter: Path | None = None,
) -> Generator:
    """A generator at the start of a text.

    Args:
        path: a .pth or .safetensors file, a Hugging Face folder, or a checkpoint step-N.
        device: see `pick_device`.
        dtype: see `pick_dtype`.
        tokenizer: see `pick_tokenizer`.
        kernel: backend of the recurrence, see `trainer.ops.wkv7.BACKENDS`.
        adapter: folder of an adapter of these weights; a tuned state is where texts start then.

    Raises:
        CheckpointError: if the weights cannot be read, or the adapter is not theirs.
        ConfigError: if an option does not fit the model or the machine.
    """
    model = load_model(path, device=device, dtype=dtype, kernel=kernel, adapter=adapter)
    generator = Generator(model, pick_tokenizer(tokenizer, model.shape.vocab_size, path))
    if adapter is not None and (found := read_adapter(adapter)).info.method == "state":
        generator.snapshot = load_state(found.source / ADAPTER_FILE, model)
    return generator


def load_model(
    path: Path, *, device: str = "auto", dtype: str = "auto", kernel: str = "auto", adapter: Path | None = None
) -> RWKV7:
    """A model with the weights of `path`, without gradients; arguments as of `load_generator`."""
    chosen = pick_device(device)
    target = pick_dtype(dtype, chosen)
    weights: Mapping[str, Tensor] = read_weights(path)
    if adapter is not None:
        found = read_adapter(adapter)
        check_adapter(found, shape_from_weights(weights), base_fingerprint(weights))
        weights = weights if found.info.method == "state" else MergedWeights(weights, found)
    with torch.device("meta"):
        model = RWKV7(shape_from_weights(weights), kernel)
    model.load_state_dict({name: tensor.to(chosen, target) for name, tensor in weights.items()}, assign=True)
    return model.requires_grad_(False)


def token_model(model: RWKV7) -> RWKV7:
    """The same weights, with the backend that is fastest for one token.

    Without compiled kernels that is the token loop: the chunked form would do the work of 16 tokens.
    """
    shape, weight = model.shape, model.ln_out.weight
    if choose_backend("auto", weight.new_empty(1, 1, shape.num_heads, shape.head_size)) == "cuda":
        return model
    with torch.device("meta"):
        twin = RWKV7(shape, "reference")
    twin.load_state_dict(model.state_dict(), assign=True)
    return twin.requires_grad_(False)


class Generator:
    """A model, its tokenizer, and what it knows of the text so far. One text at a time.

    Args:
        model: with weights; its dtype and device are used.
        tokenizer: must not give ids that the model lacks.
        chunk_tokens: tokens that are read at once. Memory grows with it.
    """

    def __init__(self, model: RWKV7, tokenizer: Tokenizer, chunk_tokens: int = 2048) -> None:
        self.model, self.tokenizer, self.chunk_tokens = model, tokenizer, chunk_tokens
        self.snapshot = Snapshot(model.zero_state(1), None)
        self.tokens_read = self.tokens_written = 0
        self.seconds_reading = self.seconds_writing = 0.0
        self._token_model = token_model(model)

    def speed(self) -> str:
        """How much was read and written so far, and how fast."""
        parts = (
            ("read", self.tokens_read, self.seconds_reading),
            ("wrote", self.tokens_written, self.seconds_writing),
        )
        return ", ".join(f"{verb} {count} tokens at {count / max(s, 1e-9):.1f} tokens/s" for verb, count, s in parts)

    def read(self, text: str) -> None:
        """Continue the text so far with `text`. Empty text changes nothing.

        Raises:
            ConfigError: if the tokenizer gives ids that the model lacks.
            DataError: if the text is not valid Unicode.
            NonFiniteLogitsError: if the model's output is NaN or infinite.
        """
        begin = time.perf_counter()
        ids = self.tokenizer.encode_array(text)
        self._read_ids(torch.from_numpy(ids.astype("int64")))
        self.tokens_read += len(ids)
        self.seconds_reading += time.perf_counter() - begin

    def stream(self, options: StreamOptions) -> Iterator[str]:
        """Write on, and yield the text as it comes.

        Afterwards the snapshot is the one after all text before and all text yielded, nothing more: what
        belongs to a stop text or stop token is taken back. With nothing read, the text starts at token 0.

        Raises:
            NonFiniteLogitsError: if the model's output is NaN or infinite.
        """
        if self.snapshot.logits_V is None:
            self._read_ids(torch.tensor([_START_OF_TEXT]))
        sampler = Sampler(options.sampling, options.seed)
        output = _Output(self.tokenizer, options.stop)
        for _ in range(options.max_tokens):
            begin = time.perf_counter()
            assert self.snapshot.logits_V is not None
            token = sampler.pick(self.snapshot.logits_V)
            if token == options.stop_token:
                break
            before = self.snapshot
            self._advance(torch.tensor([token]))
            text = output.push(token, before)
            self.tokens_written += 1
            self.seconds_writing += time.perf_counter() - begin
            if text:
                yield text
            if output.rewind is not None:
                self.snapshot, rest = output.rewind
                self._read_ids(torch.tensor(self.tokenizer.encode(rest), dtype=torch.int64))
                return
        rest = output.finish()
        if rest:
            yield rest

    def _read_ids(self, ids_T: Tensor) -> None:
        vocab_size = self.model.shape.vocab_size
        if len(ids_T) and int(ids_T.max()) >= vocab_size:
            problem = f"gives token {int(ids_T.max())}, but the model knows {vocab_size}"
            raise ConfigError("--tokenizer", problem, fix="use the tokenizer that the model was trained with")
        for piece in ids_T.split(self.chunk_tokens) if len(ids_T) else ():
            self._advance(piece)

    @torch.no_grad()
    def _advance(self, ids_T: Tensor) -> None:
        network = self._token_model if len(ids_T) == 1 else self.model
        hidden_BTC, state = network(ids_T[None].to(self.model.emb.weight.device), self.snapshot.state)
        logits_V = self.model.head(hidden_BTC[0, -1]).float()
        if not logits_V.isfinite().all():
            raise NonFiniteLogitsError(
                "logits",
                "the model's output is NaN or infinite",
                fix="try --dtype fp32; check the weights and the state",
            )
        self.snapshot = Snapshot(state, logits_V)


@dataclass
class _Written:
    """A token, by what was there before it."""

    text_length: int
    before: Snapshot


class _Output:
    """Decodes tokens, and holds text back that may turn out to be a stop text."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stop = stop
        self._text = ""
        self._num_shown = 0
        self._recent: list[_Written] = []
        self.rewind: tuple[Snapshot, str] | None = None
        """After a stop text: a snapshot from before it, and what is to be read again after that."""

    def push(self, token: int, before: Snapshot) -> str:
        """Text that is certain to be output now."""
        if self._stop:
            self._recent.append(_Written(len(self._text), before))
        self._text += self._decoder.push(token)
        cut = self._find_stop()
        if cut is not None:
            # The earliest of several tokens that begin at one place: those after it may be parts of a character.
            start = max((item for item in self._recent if item.text_length <= cut), key=lambda item: item.text_length)
            self.rewind = (start.before, self._text[start.text_length : cut])
            self._text = self._text[:cut]
            return self._show(cut)
        return self._show(len(self._text) - self._num_unsure())

    def finish(self) -> str:
        """What was held back."""
        self._text += self._decoder.finish()
        return self._show(len(self._text))

    def _show(self, upto: int) -> str:
        shown, self._num_shown = self._text[self._num_shown : upto], upto
        anchor = max((item.text_length for item in self._recent if item.text_length <= upto), default=0)
        self._recent = [item for item in self._recent if item.text_length >= anchor]
        return shown

    def _find_stop(self) -> int | None:
        places = [self._text.find(stop, self._num_shown) for stop in self._stop]
        return min((place for place in places if place >= 0), default=None)

    def _num_unsure(self) -> int:
        """Length of the longest end of the text that a stop text may begin with."""
        hidden = self._text[self._num_shown :]
        longest = min(len(hidden), max(map(len, self._stop), default=1) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(hidden[-n:]) for s in self._stop)), 0)

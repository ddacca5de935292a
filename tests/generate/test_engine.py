"""Reading and writing text: chunks, streaming, stopping, and a state that is always that of the text shown."""

from __future__ import annotations

import re

import pytest
import torch

from trainer.checkpoint.export import save_weights
from trainer.checkpoint.write import MODEL_FILE, CheckpointPayload, write_checkpoint
from trainer.data.tokenizers import ByteTokenizer, get_tokenizer
from trainer.errors import ConfigError, DataError
from trainer.generate.engine import (
    CHAT_STOP,
    Generator,
    NonFiniteLogitsError,
    StreamOptions,
    chat_turn,
    load_generator,
    pick_device,
    pick_dtype,
    pick_tokenizer,
    read_prompt,
)
from trainer.generate.sampling import Sampling
from trainer.model.init import init_weights
from trainer.model.naming import ModelShape
from trainer.model.rwkv7 import RWKV7
from trainer.model.state import state_tensors

SHAPE = ModelShape.official(2, 64, 272, head_size=16)
GREEDY = Sampling(temperature=0.0)
PROMPT = "The quick brown fox jumps over the lazy dog. " * 3


def random_weights():
    generator = torch.Generator().manual_seed(0)
    fresh = init_weights(SHAPE, 0, emb_scale=1.0)
    return {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in fresh.items()}


def make_model(weights=None, dtype=torch.float32, kernel="auto"):
    model = RWKV7(SHAPE, kernel)
    model.load_state_dict(weights or random_weights())
    return model.to(dtype).requires_grad_(False)


def chain_model(*chains: list[int]) -> RWKV7:
    """A model whose most probable token is the next one of a chain, whatever came before."""
    weights = random_weights()
    for name in weights:
        if name.endswith(("att.output.weight", "ffn.value.weight")):
            weights[name].zero_()
    weights["head.weight"].zero_()
    model = make_model(weights)
    for chain in chains:
        for token, following in zip(chain, chain[1:], strict=False):
            hidden, _ = model(torch.tensor([[token]]))
            model.head.weight[following] += hidden[0, 0]
    return model


def text_chain(text: str, *ending: int) -> list[int]:
    return [*ByteTokenizer().encode(text), *ending]


class Words:
    """A tokenizer with tokens of several letters."""

    name, digest, vocab_size, end_of_document = "words", "words", 272, 0
    table = {1: "ab", 2: "cd", 3: "ef", 4: "c", 5: "d", 6: "gh"}

    def encode(self, text):
        ids = {word: token for token, word in self.table.items()}
        return [ids[word] for word in re.findall("ab|cd|ef|gh|c|d", text)]

    def encode_array(self, text):
        return torch.tensor(self.encode(text), dtype=torch.int64).numpy()

    def token_bytes(self, token):
        return self.table.get(token, "").encode()


def write(generator: Generator, max_tokens: int = 50, **options) -> list[str]:
    return list(generator.stream(StreamOptions(**({"max_tokens": max_tokens, "sampling": GREEDY} | options))))


def assert_knows_exactly(generator: Generator, text: str) -> None:
    """The state is that of a generator that read `text` token by token."""
    other = Generator(generator.model, generator.tokenizer, chunk_tokens=1)
    other.read(text)
    pairs = zip(state_tensors(generator.snapshot.state), state_tensors(other.snapshot.state), strict=True)
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(generator.snapshot.logits_V, other.snapshot.logits_V, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk_tokens", [16, 48, 1, 7])
def test_prompt_in_chunks_is_the_prompt_at_once(chunk_tokens):
    model, ids = make_model(), ByteTokenizer().encode(PROMPT)
    generator = Generator(model, ByteTokenizer(), chunk_tokens)
    generator.read(PROMPT)
    hidden, state = model(torch.tensor([ids]))
    wanted = [model.head(hidden[0, -1]), *state_tensors(state)]
    found = [generator.snapshot.logits_V, *state_tensors(generator.snapshot.state)]
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
    assert generator.tokens_read == len(ids) == 135


def test_texts_read_one_after_another_are_one_text():
    generator = Generator(make_model(), ByteTokenizer())
    for piece in (PROMPT[:50], "", PROMPT[50:51], PROMPT[51:]):
        generator.read(piece)
    assert_knows_exactly(generator, PROMPT)


def test_greedy_text_is_that_of_whole_passes():
    model, tokenizer = make_model(kernel="reference"), ByteTokenizer()
    ids = tokenizer.encode(PROMPT)
    for _ in range(12):
        ids.append(int(model.head(model(torch.tensor([ids]))[0][0, -1]).argmax()))
    generator = Generator(make_model(), tokenizer)
    generator.read(PROMPT)
    assert "".join(write(generator, 12, stop_token=None)) == tokenizer.decode(ids[135:])
    assert generator.tokens_written == 12


def test_no_graph_is_kept():
    model = make_model().requires_grad_(True)
    generator = Generator(model, ByteTokenizer())
    generator.read(PROMPT)
    write(generator, 2)
    assert not any(x.requires_grad for x in (*state_tensors(generator.snapshot.state), generator.snapshot.logits_V))


def test_nothing_read_starts_at_the_end_of_a_document():
    generator = Generator(chain_model([0, *text_chain("wagon")]), ByteTokenizer())
    generator.read("")
    assert generator.snapshot.logits_V is None
    assert "".join(write(generator, 3)) == "wag"


def test_text_ends_at_token_zero():
    generator = Generator(chain_model(text_chain("abcdef", 0)), ByteTokenizer())
    generator.read("a")
    assert "".join(write(generator)) == "bcdef"
    assert_knows_exactly(generator, "abcdef")
    assert generator.tokens_written == 5


def test_token_zero_may_be_passed():
    generator = Generator(chain_model(text_chain("abc", 0, *text_chain("xyz"))), ByteTokenizer())
    generator.read("a")
    assert "".join(write(generator, 6, stop_token=None)) == "bcxyz"[:6]


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["def"], "bc"),
        (["b"], ""),
        (["gh", "cd"], "b"),
        (["fx", "ex", "efgi"], "bcdefgh"),
        (["h"], "bcdefg"),
        (["bcdefgh"], ""),
    ],
)
def test_stop_texts(stop, text):
    generator = Generator(chain_model(text_chain("abcdefgh", 0)), ByteTokenizer())
    generator.read("a")
    pieces = write(generator, stop=tuple(stop))
    assert "".join(pieces) == text
    assert all(pieces)
    assert_knows_exactly(generator, "a" + text)


def test_text_that_may_be_a_stop_is_held_back():
    generator = Generator(chain_model(text_chain("abcdefgh", 0)), ByteTokenizer())
    generator.read("a")
    assert write(generator, stop=("cdex",)) == ["b", "cdef", "g", "h"]


def test_held_text_is_shown_at_the_limit():
    generator = Generator(chain_model(text_chain("abcdefgh", 0)), ByteTokenizer())
    generator.read("a")
    assert write(generator, 3, stop=("cdex",)) == ["b", "cd"]
    assert_knows_exactly(generator, "abcd")


def test_stop_inside_a_token():
    generator = Generator(chain_model([1, 2, 3, 6, 0]), Words())
    generator.read("ab")
    assert "".join(write(generator, stop=("df",))) == "cdefgh"
    generator = Generator(chain_model([1, 2, 3, 6, 0]), Words())
    generator.read("ab")
    assert "".join(write(generator, stop=("de",))) == "c"
    assert_knows_exactly(generator, "abc")


def test_pieces_never_end_inside_a_character():
    text = "é€😀"
    generator = Generator(chain_model(text_chain(f"a{text}", 0)), ByteTokenizer())
    generator.read("a")
    assert write(generator) == list(text)
    generator.read("a")
    assert write(generator, 3) == ["é", "\ufffd"]
    generator = Generator(chain_model(text_chain(f"a{text}", 0)), ByteTokenizer())
    generator.read("a")
    assert write(generator, stop=("€",)) == ["é"]
    assert_knows_exactly(generator, "aé")


def test_writing_goes_on_where_it_stopped():
    whole, parts = (Generator(make_model(), ByteTokenizer()) for _ in range(2))
    for generator in (whole, parts):
        generator.read(PROMPT)
    text = "".join(write(whole, 9, stop_token=None))
    kept = parts.snapshot
    pieces = [piece for count in (4, 0, 5) for piece in write(parts, count, stop_token=None)]
    assert "".join(pieces) == text
    assert torch.equal(whole.snapshot.logits_V, parts.snapshot.logits_V)
    parts.snapshot = kept
    assert "".join(write(parts, 9, stop_token=None)) == text


def test_seeds():
    def text(seed):
        generator = Generator(make_model(), ByteTokenizer())
        generator.read("a")
        return write(generator, 20, seed=seed, sampling=Sampling(top_p=1.0), stop_token=None)

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_speed_names_both_directions():
    generator = Generator(make_model(), ByteTokenizer())
    assert generator.speed() == "read 0 tokens at 0.0 tokens/s, wrote 0 tokens at 0.0 tokens/s"
    generator.read("abc")
    write(generator, 2, stop_token=None)
    assert re.fullmatch(r"read 3 tokens at [\d.]+ tokens/s, wrote 2 tokens at [\d.]+ tokens/s", generator.speed())


def test_output_that_is_not_finite():
    weights = random_weights()
    weights["head.weight"] = torch.full_like(weights["head.weight"], 3e38)
    generator = Generator(make_model(weights), ByteTokenizer())
    with pytest.raises(NonFiniteLogitsError, match="logits: the model's output is NaN or infinite; fix: ") as caught:
        generator.read("abc")
    assert caught.value.exit_code == 1


def test_ids_that_the_model_lacks():
    generator = Generator(make_model(), get_tokenizer("world"))
    with pytest.raises(ConfigError, match="--tokenizer: gives token 33155, but the model knows 272"):
        generator.read("Hello")


def test_text_that_is_not_unicode():
    with pytest.raises(DataError, match="lone surrogate"):
        Generator(make_model(), ByteTokenizer()).read("a\udce9")


@pytest.mark.parametrize(
    ("options", "match"), [({"max_tokens": -1}, "--tokens: out of range"), ({"stop": ("",)}, "--stop: is empty")]
)
def test_options_out_of_range(options, match):
    with pytest.raises(ConfigError, match=match):
        StreamOptions(**({"max_tokens": 1} | options))


def test_chat_turns():
    first = chat_turn("  Hello\r\n\r\n\r\nthere\n\n", is_first=True)
    assert first == "User: Hello\nthere\n\nAssistant:"
    assert chat_turn("More", is_first=False) == "\n\nUser: More\n\nAssistant:"
    assert chat_turn("More", is_first=False).startswith(CHAT_STOP)
    # The trailing colon is a token of its own, and the next token brings its space.
    assert get_tokenizer("world").encode(chat_turn("Hi", is_first=True))[-3:] == [5585, 41693, 59]


def test_prompts_from_files(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes("\ufeffzwei\r\nZeilen\n".encode())
    assert read_prompt(None, file) == "zwei\r\nZeilen\n"
    assert read_prompt("text", None) == "text"
    assert read_prompt(None, None) == ""
    file.write_bytes(b"ok \xff")
    with pytest.raises(DataError, match=r"prompt.txt: is not UTF-8 at byte 3"):
        read_prompt(None, file)
    with pytest.raises(DataError, match=r"missing.txt: cannot be read: No such file"):
        read_prompt(None, tmp_path / "missing.txt")


@pytest.mark.parametrize(("vocab_size", "name"), [(65536, "world"), (257, "byte"), (272, "byte"), (512, "byte")])
def test_tokenizer_by_vocabulary(vocab_size, name):
    assert pick_tokenizer("auto", vocab_size).name == name


def test_unknown_vocabulary_needs_a_tokenizer():
    with pytest.raises(ConfigError, match="--tokenizer: a vocabulary of 50277 tells no tokenizer; fix: give one"):
        pick_tokenizer("auto", 50277)
    assert pick_tokenizer("world", 50277).name == "world"


def test_devices_and_dtypes():
    assert pick_device("cpu").type == "cpu"
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32
    assert pick_dtype("bf16", torch.device("cpu")) == torch.bfloat16
    with pytest.raises(ConfigError, match="--device: not understood; found 'gpu'"):
        pick_device("gpu")
    with pytest.raises(ConfigError, match=r"--device: cuda:99 is not there; found '\d+ GPU\(s\)'; fix: --device cpu"):
        pick_device("cuda:99")
    with pytest.raises(ConfigError, match="--dtype: not understood; found 'fp16'; must be auto, fp32 or bf16"):
        pick_dtype("fp16", torch.device("cpu"))


def test_loading_from_every_kind_of_file(tmp_path):
    weights = {name: value.bfloat16().float() for name, value in random_weights().items()}
    save_weights(weights, tmp_path / "m.pth")
    save_weights(weights, tmp_path / "m.safetensors", "fp32")
    step = write_checkpoint(tmp_path, 5, CheckpointPayload(tensors={MODEL_FILE: weights}))
    wanted = Generator(make_model(weights), ByteTokenizer())
    wanted.read("abc")
    for path in (tmp_path / "m.pth", tmp_path / "m.safetensors", step):
        generator = load_generator(path, device="cpu")
        generator.read("abc")
        assert torch.equal(generator.snapshot.logits_V, wanted.snapshot.logits_V)
    low = load_generator(tmp_path / "m.safetensors", device="cpu", dtype="bf16", kernel="reference")
    low.read("abc")
    assert low.snapshot.state[0].shift_att.dtype == torch.bfloat16
    assert low.snapshot.state[0].wkv.dtype == low.snapshot.logits_V.dtype == torch.float32
    error = (low.snapshot.logits_V - wanted.snapshot.logits_V).norm() / wanted.snapshot.logits_V.norm()
    assert 0 < error < 0.05

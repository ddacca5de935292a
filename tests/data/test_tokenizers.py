import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    StreamDecoder,
    WorldTokenizer,
    get_tokenizer,
    read_world_vocabulary,
)
from trainer.errors import ConfigError, DataError

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "data" / "vectors" / "tokenizer_vectors.json").read_text("utf-8")
)


@pytest.fixture(scope="module")
def world():
    return WorldTokenizer(add_endoftext_token=False)


@pytest.fixture(scope="module")
def oracle():
    return WorldTokenizer(add_endoftext_token=False, use_rust=False)


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    """A byte-level BPE with 300 tokens, as tokenizer.json."""
    folder = tmp_path_factory.mktemp("hf") / "my tokenizer"
    folder.mkdir()
    core = tokenizers.ByteLevelBPETokenizer()
    core.train_from_iterator(["hello world, hello there", "你好 world"] * 3, vocab_size=300, show_progress=False)
    core.save(str(folder / "tokenizer.json"))
    return folder


def random_texts(count, seed=1):
    generator = random.Random(seed)
    ranges = [(0, 0x7F), (0, 0x7FF), (0x4E00, 0x9FFF), (0, 0xFFFF), (0x10000, 0x10FFFF), (0x1F300, 0x1FAFF), (9, 13)]
    for _ in range(count):
        low, high = generator.choice(ranges)
        codes = (generator.randint(low, high) for _ in range(generator.randint(0, 60)))
        yield "".join(chr(code) for code in codes if not 0xD800 <= code <= 0xDFFF)


@pytest.mark.parametrize("case", GOLDEN["strings"], ids=lambda case: case["name"])
def test_golden_strings(case, world, oracle):
    assert world.encode(case["text"]) == case["ids"]
    assert oracle.encode(case["text"]) == case["ids"]
    assert world.decode(case["ids"]) == case["text"]


@pytest.mark.parametrize("case", GOLDEN["bytes"], ids=lambda case: case["name"])
def test_golden_bytes(case, world):
    content = bytes.fromhex(case["hex"])
    assert world.encode_bytes(content) == case["ids"]
    assert world.decode(case["ids"]) == content.decode("utf-8", errors="replace")


@pytest.mark.promise(14)
def test_two_thousand_random_texts_round_trip(world, oracle):
    byte = ByteTokenizer()
    for text in random_texts(2000):
        ids = world.encode(text)
        assert world.decode(ids) == text
        assert ids == oracle.encode(text)
        assert byte.decode(byte.encode(text)) == text


@pytest.mark.promise(14)
def test_all_one_and_two_byte_inputs(world):
    singles = [bytes([a]) for a in range(256)]
    for content in singles + [a + b for a, b in itertools.product(singles, singles)]:
        ids = world.encode_bytes(content)
        assert b"".join(world.token_bytes(token_id) for token_id in ids) == content
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue
        assert world.encode(text) == ids


def test_long_texts_are_encoded_in_pieces_with_the_same_ids(world):
    from pyrwkv_tokenizer import RWKVTokenizer

    generator = random.Random(5)
    words = ["hello ", " " * 70, "世界", "👨‍👩‍👧‍👦", "\n\n", "-" * 128, "é", "naïve ", "def f(x):\n    "]
    text = "".join(generator.choice(words) for _ in range(160_000))
    assert len(text) > 2 << 20
    ids = world.encode_array(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == RWKVTokenizer().encode(text)


@pytest.mark.parametrize("name", ["world", "byte"])
@pytest.mark.promise(14)
def test_lone_surrogates_are_refused(name):
    with pytest.raises(DataError, match="character 2 is a lone surrogate.*U\\+D83D"):
        get_tokenizer(name).encode("ab\ud83dc")


def test_endoftext_becomes_token_0_unless_switched_off():
    marked = get_tokenizer("world")
    assert marked.encode("a <|endoftext|>b<|endoftext|>") == [98, 33, 0, 99, 0]
    assert marked.encode("<|endoftext|>") == [0]
    assert marked.encode("") == []
    plain = get_tokenizer("world", world_add_endoftext_token=False)
    assert plain.encode("<|endoftext|>") == [61, 125, 25258, 7588, 2318, 125, 63]
    assert plain.digest != marked.digest


def test_decode_follows_the_product_rule(world):
    assert world.decode([98, 0, 99]) == "ab"
    assert world.decode([65530, 65535, 65536, 10**9, -1, 98]) == "a"
    assert world.decode([3319, 153]) == "\ufffd"
    assert world.decode(np.array([98, 99], np.uint16)) == "ab"
    assert ByteTokenizer().decode([0, 98, 257, 300, -5]) == "a"


def test_sizes_of_the_built_in_vocabularies(world):
    assert (world.vocab_size, ByteTokenizer().vocab_size) == (65536, 257)
    table = read_world_vocabulary()
    assert len(table) == 65536
    assert table[0] == table[65530] == b""
    assert table[65529] == b" " * 128
    assert [table[i + 1] for i in range(256)] == [bytes([i]) for i in range(256)]


def test_byte_tokenizer_is_byte_plus_one():
    tokenizer = get_tokenizer("byte")
    assert tokenizer.encode("aé\0") == [98, 0xC3 + 1, 0xA9 + 1, 1]
    assert tokenizer.encode_array("a").dtype == np.uint16
    assert tokenizer.encode_batch(["a", ""]) == [[98], []]
    assert tokenizer.end_of_document == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 65535), max_size=30))
def test_stream_decoder_emits_whole_characters_only(ids):
    tokenizer = get_tokenizer("world")
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(token_id) for token_id in ids]
    assert "".join(pieces) + decoder.finish() == tokenizer.decode(ids)


def test_stream_decoder_holds_back_an_unfinished_character(world):
    decoder = StreamDecoder(world)
    assert [decoder.push(token_id) for token_id in (98, 3319, 153, 129, 99)] == ["a", "", "", "😀", "b"]
    decoder.push(3319)
    assert decoder.finish() == "\ufffd"
    assert decoder.finish() == ""


def test_hugging_face_folder_and_file(hf_folder):
    tokenizer = get_tokenizer(str(hf_folder))
    text = "hello 你好 👍 there"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text)) < tokenizer.vocab_size
    assert tokenizer.encode_array(text).dtype == np.uint16
    assert get_tokenizer(str(hf_folder / "tokenizer.json")).encode(text) == tokenizer.encode(text)
    assert tokenizer.decode([0, 10**6, *tokenizer.encode("hello")]) == "hello"
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(token_id) for token_id in tokenizer.encode(text)]
    assert "".join(pieces) + decoder.finish() == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_hugging_face_adds_no_special_tokens(tmp_path):
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "a": 1, "[CLS]": 2}, unk_token="[PAD]"))
    core.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    core.enable_truncation(1)
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    core.save(str(tmp_path / "tokenizer.json"))
    assert HuggingFaceTokenizer(tmp_path).encode("a a a") == [1, 1, 1]


@pytest.fixture
def word_tokenizer(tmp_path):
    """A folder whose tokenizer puts [CLS] before a text, and can be told other special tokens."""
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "a": 1, "[CLS]": 2}, unk_token="[PAD]"))
    core.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return str(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_auto_tokenizer_options(word_tokenizer):
    plain = get_tokenizer(word_tokenizer)
    assert (plain.encode("a a"), plain.vocab_size) == ([1, 1], 3)
    assert get_tokenizer(word_tokenizer, auto_tokenizer={"kwargs": {}, "props": {}}) is plain
    special = get_tokenizer(word_tokenizer, auto_tokenizer={"add_special_tokens": True})
    assert special.encode("a a") == [2, 1, 1]
    options = {"kwargs": {"additional_special_tokens": ["<turn>"]}, "props": {"model_max_length": 7}}
    added = get_tokenizer(word_tokenizer, auto_tokenizer=options)
    assert (added.encode("a <turn> a"), added.vocab_size) == ([1, 3, 1], 4)
    assert added.encode_array("a").dtype == "uint16"
    assert len({plain.digest, special.digest, added.digest}) == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kwargs": {"trust_remote_code": True}}, "trust_remote_code: would run code"),
        ({"kwarg": {}}, "data.autoTokenizer.kwarg: is unknown; must be kwargs, props, add_special_tokens"),
        ({"props": [1]}, "data.autoTokenizer.props: has the wrong type"),
        ({"props": {"no_such_thing": 1}}, "data.autoTokenizer.props: this tokenizer has no no_such_thing"),
    ],
)
def test_bad_auto_tokenizer_options(options, words, word_tokenizer):
    with pytest.raises(ConfigError, match=words):
        get_tokenizer(word_tokenizer, auto_tokenizer=options)


def test_auto_tokenizer_options_need_such_a_tokenizer():
    with pytest.raises(ConfigError, match="data.autoTokenizer: acts only with a Hugging Face tokenizer, not byte"):
        get_tokenizer("byte", auto_tokenizer={"add_special_tokens": True})


def test_broken_tokenizer_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=f"data.tokenizer: {tmp_path} cannot be read"):
        get_tokenizer(str(tmp_path))


def test_unknown_name_lists_what_is_known():
    with pytest.raises(ConfigError, match="data.tokenizer.*'neo'.*world, byte, the path"):
        get_tokenizer("neo")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_folder_without_tokenizer_json_runs_no_code(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\nworld\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    tokenizer = get_tokenizer(str(tmp_path))
    assert tokenizer.encode("hello world") == [5, 6]
    assert tokenizer.decode([5, 6]) == "hello world"
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    (hostile / "code.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\nclass T: pass\n")
    (hostile / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["code.T", null]}}')
    with pytest.raises(ConfigError, match="hostile"):
        get_tokenizer(str(hostile))
    assert not (tmp_path / "canary").exists()


def test_tokenizers_of_the_hub_come_from_its_cache(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="hf download EleutherAI/gpt-neox-20b tokenizer.json"):
        get_tokenizer("neox")
    folder = tmp_path / "models--EleutherAI--gpt-neox-20b"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "hello": 1}, unk_token="[UNK]"))
    core.save(str(folder / "snapshots" / "abc" / "tokenizer.json"))
    for name in ("neox", "EleutherAI/gpt-neox-20b"):
        assert get_tokenizer(name).encode("hello") == [1]

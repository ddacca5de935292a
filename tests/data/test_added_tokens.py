"""Tokenizers from Hugging Face folders of our own kind, with tokens added. transformers reads them in checkpoint/."""

import pytest

from trainer.checkpoint.hf_tokenizer import extended_tokenizer, tokenizer_files
from trainer.data.added_tokens import read_added_tokens
from trainer.data.tokenizers import StreamDecoder, get_tokenizer, holds_tokenizer
from trainer.errors import ConfigError

NEW = ["<|im_start|>", "<|im_start|>x", "\u00ff\u3000", "dragons of Tibet"]
TEXTS = ["", "a", "<|im_start|>", "a <|im_start|>xy<|im_start|> \u00ff\u3000\u00fe dragons of Tibets<|endoftext|>b"]


def written(files, folder):
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def extended(tmp_path):
    files, first = extended_tokenizer(tokenizer_files("world", 65536), NEW, special=False)
    assert first == 65530
    return written(files, tmp_path / "extended")


def test_plain_folders_are_the_built_in_tokenizers(tmp_path):
    for name in ("world", "byte"):
        folder = written(tokenizer_files(name, 0), tmp_path / name)
        assert holds_tokenizer(folder)
        assert get_tokenizer(str(folder)).name == name
    assert not holds_tokenizer(tmp_path)


def test_added_tokens_go_both_ways(extended):
    ours = get_tokenizer(str(extended))
    for text in TEXTS:
        ids = ours.encode(text)
        assert ours.decode(ids) == text.replace("<|endoftext|>", "")
        decoder = StreamDecoder(ours)
        assert "".join(map(decoder.push, ids)) + decoder.finish() == ours.decode(ids)
    assert ours.encode_batch(TEXTS[2:3]) == [[65530]]
    assert read_added_tokens(extended) == {text: 65530 + index for index, text in enumerate(NEW)}
    assert ours.vocab_size == 65536
    assert ours.encode_array("a").dtype == "uint16"
    assert ours.digest != get_tokenizer("world").digest


def test_many_tokens_need_wider_ids_and_follow_earlier_ones(tmp_path, extended):
    files = {path.name: path.read_bytes() for path in extended.iterdir()}
    more, first = extended_tokenizer(files, [f"<tok {number}>" for number in range(5)], special=True)
    assert first == 65534
    ours = get_tokenizer(str(written(more, tmp_path / "more")))
    assert ours.encode("<tok 4><|im_start|>") == [65538, 65530]
    assert ours.vocab_size == 65539
    assert ours.encode_array("a").dtype == "int32"


def test_byte_tokenizer_is_extended(tmp_path):
    files, first = extended_tokenizer(tokenizer_files("byte", 272), ["<a>"], special=False)
    assert first == 257
    assert get_tokenizer(str(written(files, tmp_path / "x"))).encode("b<a>") == [99, 257]


def test_tokenizer_json_is_extended(tmp_path):
    import tokenizers

    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    core.save(str(tmp_path / "tokenizer.json"))
    files, first = extended_tokenizer(
        tokenizer_files(str(tmp_path / "tokenizer.json"), 300), ["<x>", "<y>"], special=True
    )
    assert first == 3
    assert get_tokenizer(str(written(files, tmp_path / "x"))).encode("a <y> b") == [1, 4, 2]
    with pytest.raises(ConfigError, match="'b' is a token already"):
        extended_tokenizer(files, ["b"], special=False)


@pytest.mark.parametrize(
    ("tokens", "mention"),
    [([], "one or more different"), (["a", ""], "one or more different"), (["<x>", "<x>"], "one or more different"), (["the"], "'the' is a token already")],
)  # fmt: skip
def test_tokens_that_cannot_be_added_are_refused(tokens, mention):
    with pytest.raises(ConfigError, match=mention):
        extended_tokenizer(tokenizer_files("world", 65536), tokens, special=False)


def test_other_files_cannot_be_extended(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be extended"):
        extended_tokenizer(tokenizer_files(str(tmp_path), 300), ["<x>"], special=False)


@pytest.mark.parametrize(
    ("name", "content", "mention"),
    [
        ("rwkv_vocab_v20230424.txt", b"1 'a' 1\n", "is not the world vocabulary"),
        ("tokenizer_config.json", b"{", "cannot be read"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "a"}}}', "cannot be read"),
    ],
)
def test_damaged_folders_are_refused(extended, name, content, mention):
    (extended / name).write_bytes(content)
    with pytest.raises(ConfigError, match=mention):
        get_tokenizer(str(extended))

"""transformers as an independent reader of exported folders: logits, generation, tokens, chats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.checkpoint.export import write_weights
from trainer.checkpoint.hf_folder import HfOptions
from trainer.checkpoint.hf_tokenizer import CHAT_TEMPLATE, extended_tokenizer, tokenizer_files
from trainer.checkpoint.read import read_weights
from trainer.data.chat_templates import tokenizer_template
from trainer.data.conversations import ChatFormat
from trainer.data.tokenizers import END_OF_TEXT, get_tokenizer
from trainer.errors import ConfigError
from trainer.model.naming import shape_from_weights
from trainer.model.rwkv7 import RWKV7

FIXTURES = Path(__file__).parents[1] / "fixtures"
TINY = FIXTURES / "vectors" / "tiny_L2_D128_V256.pth"
NO_TOKENIZER = HfOptions(tokenizer="none")


@pytest.fixture(scope="module", autouse=True)
def _code_goes_to_a_temporary_folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
        yield


@pytest.fixture(scope="module")
def weights():
    return read_weights(TINY)


@pytest.fixture(scope="module")
def exported(tmp_path_factory, weights):
    """An `hf` folder in float32."""
    out = tmp_path_factory.mktemp("export") / "hf"
    write_weights(weights, out, "fp32", "hf", NO_TOKENIZER)
    return out


def our_logits(weights, ids):
    model = RWKV7(shape_from_weights(weights))
    model.load_state_dict(weights)
    model.float()
    with torch.no_grad():
        return model.head(model(ids)[0])


def random_ids(batch, tokens):
    return torch.randint(0, 256, (batch, tokens), generator=torch.Generator().manual_seed(batch * 1000 + tokens))


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


@pytest.mark.parametrize("tokens", [1, 70])
def test_transformers_gives_our_logits(exported, weights, tokens):
    ids = random_ids(2, tokens)
    with torch.no_grad():
        found = load(exported)(ids).logits
    torch.testing.assert_close(found, our_logits(weights, ids), rtol=0, atol=2e-5)


def test_transformers_reads_the_stored_type_and_shards(tmp_path, weights):
    write_weights(weights, tmp_path / "x", "bf16", "hf", HfOptions(tokenizer="none", max_shard_bytes=300_000))
    model = load(tmp_path / "x", dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.model.layers[1].attn.w_lora.lora[0].weight, weights["blocks.1.att.w1"].T)


def test_transformers_state_carries_on(exported):
    model, ids = load(exported), random_ids(2, 40)
    with torch.no_grad():
        first = model(ids[:, :13])
        second = model(ids[:, 13:], state=first.state)
        whole = model(ids)
    torch.testing.assert_close(torch.cat((first.logits, second.logits), 1), whole.logits, rtol=0, atol=1e-5)


def test_transformers_generates_as_without_a_state_with_padding_and_beams(exported):
    model, ids = load(exported), random_ids(1, 12)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    written = model.generate(ids, **options)
    expected = ids
    with torch.no_grad():
        for _ in range(8):
            expected = torch.cat((expected, model(expected).logits[:, -1:].argmax(-1)), 1)
    assert written.tolist() == expected.tolist()
    padded = torch.cat((torch.zeros(1, 5, dtype=torch.int64), ids), 1)
    mask = torch.cat((torch.zeros(1, 5, dtype=torch.int64), torch.ones_like(ids)), 1)
    assert model.generate(padded, attention_mask=mask, **options)[0, 17:].tolist() == written[0, 12:].tolist()
    beams = model.generate(ids, num_beams=3, use_cache=True, **options)
    assert beams.tolist() == model.generate(ids, num_beams=3, use_cache=False, **options).tolist()


def test_transformers_loss_is_the_mean_over_targets(exported, weights):
    model, ids = load(exported), random_ids(2, 20)
    labels = ids.masked_fill(torch.arange(20) < 5, -100)
    loss = model(ids, labels=labels).loss
    logits = our_logits(weights, ids)[:, 4:-1]
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 5:].flatten()))
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=60).loss, loss / 2)


@pytest.fixture(scope="module")
def tokenizer_folders(tmp_path_factory):
    """Exported tokenizer files of world and byte."""
    folders = {}
    for name in ("world", "byte"):
        folders[name] = tmp_path_factory.mktemp("tokenizer") / name
        folders[name].mkdir()
        for file, content in tokenizer_files(name, 65536).items():
            (folders[name] / file).write_bytes(content)
    return folders


@pytest.fixture(scope="module")
def world(tokenizer_folders):
    return AutoTokenizer.from_pretrained(tokenizer_folders["world"], trust_remote_code=True)


def vectors():
    return json.loads((FIXTURES / "data" / "vectors" / "tokenizer_vectors.json").read_text())


TEXTS = [
    "",
    " ",
    "a b",
    "\u00e9\u4e2d\U0001f600\u3000x",
    f"one{END_OF_TEXT}  two {END_OF_TEXT}",
    "\r\n\t\x00\x7f",
    "ab" * 200,
]


def test_world_tokenizer_gives_the_official_ids(world):
    texts = [entry["text"] for entry in vectors()["strings"]]
    assert len(texts) > 30
    ours = get_tokenizer("world")
    for text in texts + TEXTS:
        assert world.encode(text) == ours.encode(text), text
    assert world.encode(texts[5]) == vectors()["strings"][5]["ids"]


@pytest.mark.parametrize("name", ["world", "byte"])
def test_tokenizers_agree_both_ways(tokenizer_folders, name):
    theirs = AutoTokenizer.from_pretrained(tokenizer_folders[name], trust_remote_code=True)
    ours = get_tokenizer(name)
    for text in TEXTS:
        ids = ours.encode(text)
        if name == "world" or END_OF_TEXT not in text:
            assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    broken = ours.encode("\u4e2d")[:-1] + [200]
    assert theirs.decode(broken) == ours.decode(broken)
    assert theirs.eos_token_id == theirs.pad_token_id == 0


def test_batches_are_padded_on_the_left(world):
    batch = world(["User: hi", "a"], padding=True, return_tensors="pt")
    assert batch["input_ids"][1, 0] == 0
    assert batch["attention_mask"][1].tolist()[-1] == 1
    assert set(batch) == {"input_ids", "attention_mask"}


def test_saved_again_it_is_the_same(world, tmp_path):
    world.add_tokens(["<|im_start|>", "\u00ff"])
    world.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    text = "a <|im_start|> b \u00ff"
    assert again.encode(text) == world.encode(text)
    assert 65530 in again.encode(text)
    assert again.decode(again.encode(text)) == text


CHATS = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": "  a\n\n \t\nb\n\n\nc\u3000\n\u3000\nd  "},
        {"role": "assistant", "content": " x\n\ny "},
    ],
    [
        {"role": "system", "content": "Be\r\n\r\nbrief."},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ],
    [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "", "reasoning_content": " why \n\n so "},
        {"role": "user", "content": ""},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"name": "f", "arguments": {"x": "\u00e9'<"}}, {"name": "g"}],
        },
        {"role": "tool", "content": "42\n\n43"},
        {"role": "assistant", "content": "so", "thinking": "hm", "tool_calls": [{"name": "f"}]},
    ],
]
TOOLS = [{"name": "f", "description": "\u00e9"}, {"name": "g"}]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("messages", CHATS)
def test_chat_template_renders_rwkv_g1(world, messages, tools):
    record = {"messages": messages, "tools": tools}
    wanted = "".join(segment.text for segment in ChatFormat("messages", "messages").segments(record))
    assert world.apply_chat_template(messages, tools=tools, tokenize=False) == wanted
    prompt = world.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert prompt == f"{wanted}\n\nAssistant:"


def test_chat_template_is_read_by_the_trainer(tokenizer_folders):
    assert tokenizer_template(tokenizer_folders["world"]).source == CHAT_TEMPLATE


def test_added_tokens_are_those_of_the_trainer(tmp_path):
    new = ["<|im_start|>", "<|im_start|>x", "\u00ff\u3000", "dragons of Tibet"]
    files, _ = extended_tokenizer(tokenizer_files("world", 65536), new, special=False)
    files, first = extended_tokenizer(files, ["<special>", *(f"<{number}>" for number in range(5))], special=True)
    assert first == 65534
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    ours, theirs = get_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    for text in [
        *TEXTS,
        "a <|im_start|>xy<|im_start|> \u00ff\u3000\u00fe dragons of Tibets<|endoftext|>b<4> <special>",
    ]:
        ids = ours.encode(text)
        assert theirs.encode(text) == ids, text
        assert theirs.decode(ids).replace(END_OF_TEXT, "") == ours.decode(ids)
    assert theirs.decode([98, first, 65530], skip_special_tokens=True) == "a<|im_start|>"


def test_other_tokenizers_are_copied(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    assert tokenizer_files(str(tmp_path), 300) == {"tokenizer.json": b"{}"}
    assert tokenizer_files("auto", 300) == tokenizer_files("none", 300) == {}
    with pytest.raises(ConfigError, match="holds no tokenizer files"):
        tokenizer_files(str(tmp_path / "none"), 300)


def test_the_version_of_transformers_is_one_that_exports_claim():
    assert tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 48)

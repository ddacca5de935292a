"""Golden rows: of each record, the whole decoded text and the exact pieces of it that are trained.

`⏹` stands for token 0. Trained pieces are the maximal runs of trained tokens, so a mask that is off by one
token, or a border inside a merged token, fails.
"""

import json

import numpy as np
import pytest

from trainer.config.schema import DataConfig
from trainer.data.encode import Encoder
from trainer.data.format_choice import find_format, format_settings
from trainer.data.lanes import LanePlan, Lanes
from trainer.data.source_files import RecordBatch
from trainer.data.store import FlatStore
from trainer.data.tokenizers import get_tokenizer

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}] {% if m.role == 'assistant' %}{% generation %}{{ m.content }}!"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
CHAT = [
    {"role": "system", "content": "Be\n\nbrief. "},
    {"role": "user", "content": "Hi\r\n\r\n\r\nthere"},
    {"role": "assistant", "content": "Hello!\n\nHow are you?"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": " Bye. "},
]
CHAT_TEXT = (
    "System: Be\nbrief.\n\nUser: Hi\nthere\n\nAssistant: Hello!\n\nHow are you?\n\nUser: Bye\n\nAssistant: Bye.⏹"
)
SHARE = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
IO = {
    "conversation_format": "iopairs",
    "conversation_key": "turns",
    "conversation_input_key_prefix_map": {"q": "Q: ", "a": "A: "},
    "conversation_input_key_mask": {"q": False},
    "conversation_sender_suffix": {"q": "\n", "a": "\n\n"},
}
SENDER = {
    "conversation_format": "sender",
    "conversation_key": "log",
    "conversation_sender_key": "who",
    "conversation_input_key_map": {"say": "\n{sender}: "},
    "conversation_sender_value_map": {"h": "Human", "b": "Bot"},
    "conversation_sender_mask": {"h": False},
}
COLUMNS = {"instruction": "Add.", "input": "1 1", "output": "2"}

ROWS = {
    "text": ({}, {"text": "Ünïcode 世界"}, "Ünïcode 世界⏹", ["Ünïcode 世界⏹"]),
    "text-other-column": ({"custom_text_key": "body"}, {"body": "abc", "text": "no"}, "abc⏹", ["abc⏹"]),
    "text-untrained-end": ({"train_on_end": False}, {"text": "abc def"}, "abc def⏹", ["abc def"]),
    "text-without-end": ({"append_end_of_document": False}, {"text": "abc def"}, "abc def", ["abc def"]),
    "text-prefix-skip": ({"data_prefix_skip_mask": 2, "tokenizer": "byte"}, {"text": "abcd"}, "abcd⏹", ["cd⏹"]),
    "prompt-completion": ({}, {"prompt": "Q: 1?\n", "completion": "A: 2"}, "Q: 1?\nA: 2⏹", ["A: 2⏹"]),
    "prompt-trained": (
        {"disable_prompt_completion_mask": True},
        {"prompt": "Q: 1?\n", "completion": "A: 2"},
        "Q: 1?\nA: 2⏹",
        ["Q: 1?\nA: 2⏹"],
    ),
    "columns": (
        {},
        COLUMNS,
        "Instruction:\nAdd.\n\nInput:\n1 1\n\nOutput:\n2⏹",
        ["Instruction:\nAdd.", "Output:\n2⏹"],
    ),
    "columns-empty-input": (
        {},
        {**COLUMNS, "input": ""},
        "Instruction:\nAdd.\n\nOutput:\n2⏹",
        ["Instruction:\nAdd.\n\nOutput:\n2⏹"],
    ),
    "columns-null-input": ({}, {**COLUMNS, "input": None, "output": "x"}, "Instruction:\nAdd.\n\nOutput:\nx⏹", None),
    "columns-own": (
        {
            "multi_column_keys": ["q", "a"],
            "multi_column_prefix": ["<q>", "<a>"],
            "multi_column_suffix": ["</q>", "</a>"],
            "multi_column_train_mask": [False, True],
            "multi_column_separator": " | ",
        },
        {"q": "one", "a": "two", "id": 7},
        "<q>one</q> | <a>two</a>⏹",
        ["<a>two</a>⏹"],
    ),
    "messages": ({}, {"messages": CHAT}, CHAT_TEXT, [" Hello!\n\nHow are you?\n\n", " Bye.⏹"]),
    "messages-mask-history": ({"mask_history": True}, {"messages": CHAT}, CHAT_TEXT, [" Bye.⏹"]),
    "messages-untrained-ends": (
        {"train_on_end": False},
        {"messages": CHAT},
        CHAT_TEXT,
        [" Hello!\n\nHow are you?", " Bye."],
    ),
    "messages-train-flag": (
        {},
        {"messages": [{**CHAT[1], "train": True}, {**CHAT[2], "train": False}, *CHAT[3:]]},
        "User: Hi\nthere\n\nAssistant: Hello!\n\nHow are you?\n\nUser: Bye\n\nAssistant: Bye.⏹",
        [" Hi\nthere\n\n", " Bye.⏹"],
    ),
    "messages-all-roles": (
        {"roles_to_train": ["system", "user", "assistant"]},
        {"messages": CHAT[:3]},
        "System: Be\nbrief.\n\nUser: Hi\nthere\n\nAssistant: Hello!\n\nHow are you?⏹",
        [" Be\nbrief.\n\n", " Hi\nthere\n\n", " Hello!\n\nHow are you?⏹"],
    ),
    "messages-user-last": (
        {},
        {"messages": CHAT[1:4]},
        "User: Hi\nthere\n\nAssistant: Hello!\n\nHow are you?\n\nUser: Bye⏹",
        [" Hello!\n\nHow are you?\n\n"],
    ),
    "messages-thinking": (
        {},
        {"messages": [CHAT[3], {"role": "assistant", "content": "Bye", "reasoning_content": "short"}]},
        "User: Bye\n\nAssistant: <think>\nshort\n</think>\nBye⏹",
        [" <think>\nshort\n</think>\nBye⏹"],
    ),
    "messages-tool": (
        {},
        {"messages": [CHAT[3], CHAT[4], {"role": "tool", "content": '{"x": 1}'}, CHAT[4]]},
        'User: Bye\n\nAssistant: Bye.\n\nUser: Function output:\n{"x": 1}\n\nAssistant: Bye.⏹',
        [" Bye.\n\n", " Bye.⏹"],
    ),
    "sharegpt": ({}, {"conversations": SHARE}, "User: 2+2?\n\nAssistant: 4⏹", [" 4⏹"]),
    "sharegpt-system-column": (
        {"conversation_format": "sharegpt", "conversation_key": "dialog"},
        {"dialog": SHARE, "system": "Sums."},
        "System: Sums.\n\nUser: 2+2?\n\nAssistant: 4⏹",
        [" 4⏹"],
    ),
    "jinja": (
        {"chat_template": "jinja:{chatml}", "append_end_of_document": False},
        {"messages": CHAT[3:]},
        "<|user|>\nBye<|end|>\n<|assistant|>\n Bye. <|end|>\n",
        [" Bye. <|end|>\n"],
    ),
    "jinja-marked": (
        {"chat_template": "jinja:{marked}"},
        {"messages": [*CHAT[3:], *CHAT[3:]]},
        "[user] Bye[assistant]  Bye. ![user] Bye[assistant]  Bye. !⏹",
        [" Bye. !", " Bye. !⏹"],
    ),
    "iopairs": (
        IO,
        {"turns": [{"q": "a?", "a": "b"}, {"q": "c?", "a": "d", "note": "left out"}]},
        "Q: a?\nA: b\n\nQ: c?\nA: d\n\n⏹",
        ["A: b\n\n", "A: d\n\n⏹"],
    ),
    "iopairs-record": (
        {**IO, "conversation_key": None, "conversation_end_of_conversation": "END"},
        {"a": "b", "q": "a?"},
        "A: b\n\nQ: a?\nEND⏹",
        ["A: b\n\n", "END⏹"],
    ),
    "sender": (
        SENDER,
        {"log": [{"who": "h", "say": "hi"}, {"who": "b", "say": "yo"}, {"who": "c", "say": "hm"}]},
        "\nHuman: hi\nBot: yo\nc: hm⏹",
        ["\nBot: yo\nc: hm⏹"],
    ),
    "tokenized": ({}, {"input_ids": [33155, 45, 40213, 0], "loss_mask": [0, 0, 1, 1]}, "Hello, world⏹", [" world⏹"]),
    "tokenized-labels": ({}, {"input_ids": [33155, 45, 40213], "labels": [-100, 45, -100]}, "Hello, world", [","]),
}  # fmt: skip


def shown(tokenizer, ids):
    text = ""
    part = []
    for token in [*ids, None]:
        if token in (0, None):
            text += tokenizer.decode(part) + ("⏹" if token == 0 else "")
            part = []
        else:
            part.append(token)
    return text


def runs(ids, mask):
    borders = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return [ids[start:stop] for start, stop in zip(borders[::2], borders[1::2], strict=True)]


def encode(settings, record, tmp_path):
    for name, template in (("chatml", CHATML), ("marked", MARKED)):
        (tmp_path / f"{name}.jinja").write_text(template)
    filled = json.loads(
        json.dumps(settings)
        .replace("{chatml}", f"{tmp_path}/chatml.jinja")
        .replace("{marked}", f"{tmp_path}/marked.jinja")
    )
    data = DataConfig(**filled)
    format_settings(data)
    encoder = Encoder(
        data.tokenizer,
        append_end_of_document=data.append_end_of_document,
        record_format=find_format(data, record, "test"),
        train_on_end=data.train_on_end,
        prefix_skip=data.data_prefix_skip_mask,
    )
    batch = encoder(RecordBatch([("line 1", record)]))
    mask = np.ones(len(batch.ids), np.uint8) if batch.mask is None else batch.mask
    return get_tokenizer(data.tokenizer), batch.ids, mask


@pytest.mark.parametrize("name", ROWS)
def test_golden_row(name, tmp_path):
    settings, record, text, trained = ROWS[name]
    tokenizer, ids, mask = encode(settings, record, tmp_path)
    trained = [text] if trained is None else trained
    assert shown(tokenizer, ids.tolist()) == text
    assert [shown(tokenizer, part.tolist()) for part in runs(ids, mask)] == trained
    # Token by token: where training starts and ends, the text is tokenized anew, and nowhere else.
    pieces, rest = [], text
    for part in trained:
        before, _, rest = rest.partition(part)
        pieces += [(before, 0), (part, 1)]
    expected = [
        (token, learn)
        for piece, learn in [*pieces, (rest, 0)]
        for token in [
            *tokenizer.encode(piece.removesuffix("⏹")),
            *([0] if piece.endswith("⏹") else []),
        ]
    ]
    assert list(zip(ids.tolist(), mask.tolist(), strict=True)) == expected


@pytest.mark.parametrize("name", ["messages", "prompt-completion", "iopairs"])
def test_first_completion_token_is_trained_and_padding_is_not(name, tmp_path):
    settings, record, _, trained = ROWS[name]
    tokenizer, ids, mask = encode(settings, record, tmp_path)
    tail = np.array([9, 9, 0], ids.dtype)
    store = FlatStore("x", [np.concatenate([ids, tail])], np.array([len(ids), 3]), [np.concatenate([mask, [0, 0, 1]])])
    plan = LanePlan(world_size=1, rank=0, rows_per_step=2, microbatch_size=2, ctx_len=16, seed=0)
    lanes = Lanes(store, DataConfig(batching="documents", dataloader_prefetch_factor=0), plan)
    (batch,) = next(iter(lanes)).microbatches
    targets, weight = batch.targets_BT[0].numpy(), batch.weight_BT[0].numpy()
    assert [shown(tokenizer, part.tolist()) for part in runs(targets, weight)] == trained
    assert batch.weight_BT[1].tolist() == [0, 1] + [0] * (len(ids) - 3)

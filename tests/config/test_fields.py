"""The table of settings that help, checks and documentation read."""

from typing import Any, Literal

import pytest

from trainer.config.fields import SECTIONS, accepts, describe_type, settings


def test_every_setting_says_what_it_is():
    short = [key for key, setting in settings().items() if len(setting.doc) < 20]
    assert not short


def test_keys_are_those_of_the_older_trainer_where_it_had_one():
    known = {"model.ctx_len", "model.load_model", "model.lr_init", "data.data_path", "data.source", "data.tokenizer",
             "trainer.target_batch_size", "trainer.microbatch_size", "trainer.precision", "seed_everything", "resume",
             "model.bptt_learning_range", "data.dataloader_shuffle_training", "checkpoint.every_steps"}  # fmt: skip
    assert known <= set(settings())


def test_sections_come_in_the_order_of_the_documentation():
    seen = list(dict.fromkeys(setting.section for setting in settings().values() if setting.section))
    assert seen == list(SECTIONS)


@pytest.mark.parametrize(
    ("annotation", "value", "is_legal"),
    [
        (int, 1, True), (int, True, False), (int, 1.0, False), (int, "1", False), (int, None, False),
        (float, 1, True), (float, 1.5, True), (float, False, False), (bool, True, True), (bool, 1, False),
        (str, "a", True), (str, 1, False), (int | None, None, True), (Literal["a", "b"], "a", True),
        (Literal["a", "b"], "c", False), (int | Literal["full"], "full", True), (int | Literal["full"], "half", False),
        (dict[str, int] | None, {"w": 1}, True), (dict[str, int], {"w": "x"}, False), (dict[str, int], [1], False),
        (dict[str, Any], {"w": [1]}, True),
    ],
)  # fmt: skip
def test_types(annotation, value, is_legal):
    assert accepts(annotation, value) is is_legal


def test_types_in_words():
    assert describe_type(int | Literal["full"]) == "an int or one of full"
    assert describe_type(dict[str, int] | None) == "a mapping whose values are an int or null"

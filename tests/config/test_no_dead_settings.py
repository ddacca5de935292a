"""Every setting of the schema acts: something outside `trainer/config` reads it."""

import ast
import dataclasses
from pathlib import Path

import pytest

from trainer.config import CheckpointConfig, DataConfig, ModelConfig, RunConfig, TrainerConfig

ROOT = Path(__file__).parents[2]
CONFIGS = (ModelConfig, DataConfig, TrainerConfig, CheckpointConfig, RunConfig)


def names_read() -> set[str]:
    """Attributes that are loaded, and words of texts (settings are also read through getattr), outside config."""
    names: set[str] = set()
    files = [path for path in ROOT.glob("trainer/**/*.py") if "config" not in path.relative_to(ROOT).parts]
    for path in [*files, *ROOT.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_setting_is_read_somewhere(config):
    unread = {field.name for field in dataclasses.fields(config)} - names_read()
    assert not unread, f"settings that nothing reads: {sorted(unread)}"

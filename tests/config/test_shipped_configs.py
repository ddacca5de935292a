"""Every YAML in configs/ is a config of today, and the generated files are what the schema generates."""

import dataclasses
import os
from pathlib import Path

import pytest

from trainer.cli import parse_run_config
from trainer.config import RunConfig
from trainer.config.examples import EXAMPLE_VALUES, full_example, settings_page
from trainer.config.fields import settings

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/**/*.yaml")), ids=lambda path: path.stem)
def test_parses_and_passes_the_checks_of_values(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    parse_run_config(["-c", os.path.relpath(path)], command="preload")


@pytest.mark.parametrize(
    ("name", "text"), [("configs/example-full.yaml", full_example), ("docs/settings.md", settings_page)]
)
def test_generated_file_is_up_to_date(name, text):
    assert (ROOT / name).read_text(encoding="utf-8") == text(), "run python -m trainer.config.examples"


def test_full_example_holds_every_setting_at_its_default():
    run, defaults = parse_run_config([str(ROOT / "configs/example-full.yaml")]), RunConfig()
    changed = {key for key in EXAMPLE_VALUES if key.split(".")[0] in ("model", "data")} | {"checkpoint.dir"}
    for key, setting in settings().items():
        if setting.section in ("model", "data", "trainer", "checkpoint") and key not in changed | {"trainer.devices"}:
            owners = [(getattr(run, setting.section), getattr(defaults, setting.section)), (run, defaults)]
            found, default = next(pair for pair in owners if hasattr(pair[0], setting.name))
            assert getattr(found, setting.name) == getattr(default, setting.name), key
    assert run.checkpoint.dir == "runs/example-full"
    assert dataclasses.replace(run.model, n_layer=None, n_embd=None) == defaults.model


def test_full_example_comments_every_key():
    lines = full_example().splitlines()
    for setting in settings().values():
        indent = "  " if setting.section else ""
        index = next(i for i, line in enumerate(lines) if line.startswith(f"{indent}{setting.name}:"))
        assert lines[index - 1].startswith(f"{indent}#"), setting.key

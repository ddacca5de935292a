"""What documents say can be followed: links, paths, settings, make targets, commands."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from trainer.config.fields import settings

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/results/*.md")])
SCRIPTS = sorted(ROOT.glob("*.py"))

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"(?:trainer|kernels|configs|notebooks|tests|benchmarks|docs)/[\w./-]*")
_SETTING = re.compile(r"(?:model|data|checkpoint)\.[a-z]\w*")
_MAKE = re.compile(r"\bmake (?:[A-Z]+=\S+ )*([a-z][a-z-]*)")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def prose(page):
    """The page without fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page):
    """Names of the page's headings, as GitHub makes them."""
    lines = prose(page).splitlines()
    headings = [line.lstrip("#").strip().lower() for line in lines if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pages
def test_links_lead_somewhere(page):
    for target in _LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        goal = (page.parent / name).resolve() if name else page
        assert goal.exists(), target
        if anchor:
            assert anchor in anchors(goal), target


@pages
def test_paths_in_code_exist(page):
    for code in _CODE.findall(prose(page)):
        path, _, test = code.partition("::")
        if not _PATH.fullmatch(path):
            continue
        assert (ROOT / path).exists(), code
        if test:
            assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), code


@pages
def test_settings_exist(page):
    for code in _CODE.findall(page.read_text(encoding="utf-8")):
        name = re.split(r"[:=\s]", code.removeprefix("--"), maxsplit=1)[0]
        assert not _SETTING.fullmatch(name) or name in settings(), code


@pages
def test_make_targets_exist(page):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    text = page.read_text(encoding="utf-8")
    for code in [*_CODE.findall(text), *_FENCE.findall(text)]:
        for target in _MAKE.findall(code):
            assert target in targets, code


@pytest.mark.parametrize("command", ["", "fit", "validate"])
def test_trainer_explains_itself(command, monkeypatch, capsys):
    words = [*command.split(), "--help"]
    assert run_script(ROOT / "lightning_trainer.py", words, monkeypatch) == 0
    shown = capsys.readouterr().out
    assert "usage:" in shown
    assert not command or "--model.bptt_window" in shown


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_explains_itself(script, monkeypatch, capsys):
    assert run_script(script, ["--help"], monkeypatch) == 0
    assert f"usage: {script.name}" in capsys.readouterr().out


def run_script(script, words, monkeypatch):
    """Exit code of a root script, run in this process."""
    monkeypatch.setattr(sys, "argv", [script.name, *words])
    monkeypatch.syspath_prepend(str(ROOT))
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script), run_name="__main__")
    return stop.value.code or 0

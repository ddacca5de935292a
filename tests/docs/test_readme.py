"""The README's commands run as they stand: what follows a `<!-- test -->` line, a bash block or a table, in order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
LEFT_OUT = {".git", ".venv", "runs", "build"}


def tagged_commands():
    """Shell text of each tagged block; the commands of a tagged table, one by one."""
    found = []
    for part in README.read_text(encoding="utf-8").split("<!-- test -->\n")[1:]:
        if part.startswith("```bash\n"):
            found.append(part.removeprefix("```bash\n").partition("\n```")[0])
        else:
            rows = part.lstrip("\n").partition("\n\n")[0].splitlines()
            found += [code for row in rows for code in re.findall(r"`(python3 [^`]+)`", row)]
    return found


def test_what_is_tagged():
    commands = "\n".join(tagged_commands())
    scripts = ["init_model.py", "preload_datapath.py", "export_checkpoint.py", "generate.py", "dragon_test.py"]
    options = ["fit -c", "validate -c", "--resume=auto", "--dry-run", "--print_config", "--model.bptt_window=full"]
    for word in scripts + options:
        assert word in commands, word


@pytest.mark.slow
def test_tagged_commands_run(tmp_path):
    # Links to the repository's files beside a `runs` folder of its own: what a user sees, and nothing is left behind.
    for entry in ROOT.iterdir():
        if entry.name not in LEFT_OUT:
            (tmp_path / entry.name).symlink_to(entry)
    interpreter = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{interpreter}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    for command in tagged_commands():
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"

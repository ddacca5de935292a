"""What must not matter (clock, time zone, locale, folder, hash seed), and what must not be seen (secrets, noise)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from harness import ROOT, Record, checkpoints

CANARY = "CANARYSECRET0123456789"
OTHER_PLACE = {"TZ": "Asia/Kathmandu", "LC_ALL": "C", "LANG": "C", "HOSTNAME": "elsewhere"}


def assert_only_our_lines(output: str) -> None:
    """Each line is ours: a level, then the text."""
    assert [line for line in output.splitlines() if not line.startswith(("I ", "W ", "error: "))] == []


@pytest.mark.fault(64)
def test_place_and_time_change_nothing(truth, another, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    output = another.fit(environment=OTHER_PLACE, cwd=tmp_path / "elsewhere", faults=("year_2038",))
    assert another.record().differences(truth.record) == []
    assert_only_our_lines(output)


@pytest.mark.fault(28)
def test_time_stamps_do_not_choose_the_checkpoint(truth, another):
    assert another.start("--checkpoint.keep=0", failpoint="step:9").wait() == -9
    for age, path in enumerate(checkpoints(another.run)):
        for entry in (*path.iterdir(), path):
            os.utime(entry, (2e9 - age * 1e6, 2e9 - age * 1e6))
    assert "at step 8" in another.fit()
    assert another.record().differences(truth.record) == []


@pytest.mark.slow
@pytest.mark.fault(64)
def test_a_process_of_its_own_gives_the_same_and_says_only_what_we_say(truth, tmp_path):
    """Locale, hash seed and warnings are settled when Python starts: this run is not forked."""
    environment = {
        **os.environ, **OTHER_PLACE, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "77",
        "LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0",
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "lightning_trainer.py"), "fit", "-c", str(truth.workplace.config)]
    for steps in (5, 11):
        words = [f"--checkpoint.dir={tmp_path}/run", "--resume=auto", f"--trainer.max_steps={steps}"]
        words += ["--model.lr_schedule=constant"] if steps == 5 else []
        result = subprocess.run(
            [*command, *words], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout == ""
        assert_only_our_lines(result.stderr)
    whole = subprocess.run(
        [*command, f"--checkpoint.dir={tmp_path}/whole"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert whole.returncode == 0, whole.stderr
    assert Record.of(tmp_path / "whole").differences(truth.record) == []


@pytest.mark.fault(66)
def test_secrets_reach_no_output(another, tmp_path):
    """They stand in the settings and in the environment; the runs write logs, data, metrics, checkpoints."""
    texts = ["".join(chr(97 + (i * j) % 26) for j in range(200)) for i in range(1, 9)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ["--data.source=json", f"--data.source_data_dir={tmp_path}", f"--data.data_path={tmp_path}/data"]
    environment = {"WANDB_API_KEY": CANARY, "AWS_SECRET_ACCESS_KEY": CANARY, "HF_TOKEN": CANARY}
    another.fit(*options, "--trainer.max_steps=2", environment=environment)
    for number, steps in enumerate((6, 8)):
        secrets = {"token": f"{CANARY}{number}", "storage_options": {"secret_key": CANARY, "url": f"s3://u:{CANARY}@h"}}
        output = another.fit(
            *options, "--data.skip_datapath_setup=true", f"--data.source_dataset_params={json.dumps(secrets)}",
            f"--trainer.max_steps={steps}", environment=environment,
        )  # fmt: skip
        assert "changed since" in output
    assert "***" in (another.run / "step-8" / "MANIFEST.json").read_text()
    assert [path for path in tmp_path.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()] == []


@pytest.mark.fault(66)
def test_secrets_in_a_refused_config_are_not_repeated(make_workplace):
    workplace = make_workplace(data={"s3_secret_key": CANARY})
    output = workplace.fit(code=2)
    assert "s3_secret_key" in output
    assert CANARY not in output

"""A run that is killed in the middle of an epoch sees the tokens that an uninterrupted one sees.

However many steps are prepared ahead (0, 1 or 4, before the kill and after it), however many processes tokenize, on
one rank and on two, for prepared data and for data that are read while training. Equal losses in hexadecimal, lane
states and weights say so.
"""

from __future__ import annotations

import json

import pytest
from harness import DONE, KILLED, make_run, read_rows
from test_ranks import Ranks

pytestmark = pytest.mark.slow
KINDS = ("stream", "documents", "streaming")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Files of JSON lines, several passes over which are a run."""
    folder = tmp_path_factory.mktemp("source")
    for file in range(3):
        lines = [json.dumps({"text": f"{file}.{i}" + "abcdefgh"[i % 5 :] * (i % 7 + 2)}) + "\n" for i in range(8)]
        (folder / f"{file}.jsonl").write_text("".join(lines))
    return folder


def sections(kind, sources, trainer):
    data = {"batching": "stream"}
    if kind == "documents":
        data = {"batching": "documents", "chunks_per_step": 1}
    if kind == "streaming":
        data |= {"source": "json", "source_data_dir": str(sources), "streaming": True, "streaming_shuffle_buffer": 10}
    return {"data": data | {"dataloader_prefetch_factor": 2}, "trainer": trainer}


@pytest.fixture(scope="module")
def truth_of(parent, corpus, sources, tmp_path_factory):
    """A function that makes the uninterrupted run of a kind on so many ranks, once."""
    made = {}

    def find(kind, num_ranks):
        if (kind, num_ranks) not in made:
            # Two ranks have one row of each micro-batch.
            trainer = {"devices": num_ranks, "microbatch_size": 2 // num_ranks}
            if num_ranks == 2:
                trainer["strategy"] = "ddp"
            if kind == "streaming":
                trainer["val_check_interval"] = 4
            folder = tmp_path_factory.mktemp(kind) / "work"
            ranks = Ranks(make_run(parent, corpus, folder, sections(kind, sources, trainer)))
            fit(ranks, num_ranks, "truth")
            made[kind, num_ranks] = ranks, ranks.record("truth")
        return made[kind, num_ranks]

    return find


def fit(ranks, num_ranks, name, *options, failpoint=""):
    """Run it; with a failpoint it must be killed, on the last rank."""
    if num_ranks == 1:
        ranks.run(name).fit(*options, failpoint=failpoint, code=KILLED if failpoint else DONE)
        return
    codes, output = ranks.fit(name, *options, failpoint=failpoint)
    assert codes == ([6, KILLED] if failpoint else [DONE, DONE]), output


CASES = [(kind, ahead, 1) for kind in KINDS for ahead in (0, 1, 4)] + [("streaming", 4, 2)]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("kind", "ahead", "processes"), CASES)
def test_killed_and_resumed(truth_of, kind, ahead, processes, num_ranks):
    ranks, truth = truth_of(kind, num_ranks)
    assert len(truth.rows) == 11
    assert truth.validation
    name = f"ahead-{ahead}-{processes}"
    options = [f"--data.dataloader_prefetch_factor={ahead}", f"--data.num_proc={processes}"]
    fit(ranks, num_ranks, name, *options, failpoint="step:7")
    assert 4 <= read_rows(ranks.run(name).run)[-1]["step"] < 11
    fit(ranks, num_ranks, name, *options)
    assert ranks.record(name).differences(truth) == []

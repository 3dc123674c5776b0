"""`kill -9` of the launcher in mid-run: nothing of the run is left, and the run that is started next is alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

from shoal.checkpoint.lock import DirectoryLock
from tests.e2e.test_llm_strategies import lines, train
from tests.e2e.tiny_llm import configuration
from tests.processes import survivors
from tests.zygote import RankRunner

STEPS = 2000
"""More than two ranks do while this test runs."""


def test_nothing_of_the_run_is_left_and_the_next_one_goes_on(ranks: RankRunner, tmp_path: Path) -> None:
    run = tmp_path / "run"
    mapping = configuration(
        tmp_path,
        num_rows=8 * STEPS,  # one epoch, as data workers end with theirs
        step_scheduler={
            "num_epochs": 1,
            "max_steps": STEPS,
            "ckpt_every_steps": 1,
            "val_every_steps": STEPS,
        },
        lr_scheduler={"lr_decay_steps": STEPS},
        dataloader={"num_workers": 1},
        checkpoint={"restore_from": "latest", "keep_last": 2},
    )
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(mapping))
    command = [sys.executable, "-m", "shoal.cli", "train", str(file), "--nproc-per-node", "2"]
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    started: list[psutil.Process] = []
    try:
        end = time.monotonic() + 180
        while not list(run.glob("step=*")):
            assert time.monotonic() < end and launcher.poll() is None, (tmp_path / "log").read_text()[-4000:]
            time.sleep(0.05)
        started = psutil.Process(launcher.pid).children(recursive=True)
        assert len(started) >= 5  # torchrun, two ranks, their data workers
        launcher.kill()
        launcher.wait()
        # The workers that torch starts look for their parent every five seconds.
        assert survivors(started, 10) == []
    finally:
        for process in survivors(started, 0):
            process.kill()
        launcher.kill()
    lock = DirectoryLock(run)
    lock.acquire(0)
    lock.release()
    last = lines(run, "training")[-1]["step"]
    mapping["step_scheduler"]["max_steps"] = int(last) + 2
    mapping["dataloader"]["num_workers"] = 0
    ranks(train, 1, mapping, init=False, timeout=120)
    assert [line["step"] for line in lines(run, "training")] == list(range(1, int(last) + 3))
    assert not list(run.glob("*.incomplete"))

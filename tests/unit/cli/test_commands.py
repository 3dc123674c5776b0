"""The command line: cheap help, one message for what is refused, and where ranks are started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

import shoal.cli.arguments
import shoal.cli.train
from shoal import __version__
from shoal.cli import COMMANDS, main
from shoal.cli.arguments import run_on_ranks
from shoal.config import ConfigError, Finding, Loaded
from shoal.launch.local import launched_world_size, run_local, torchrun_command
from shoal.launch.tied import tied_command
from tests.processes import survivors
from tests.unit.config.base import base, merged

EXAMPLE = Path(__file__).parents[3] / "examples" / "speechlm2" / "salm_train.py"
LAUNCHER_KEYS = ("LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_ID", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in LAUNCHER_KEYS:
        monkeypatch.delenv(key, raising=False)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(base("speech")))
    return file


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records what would be trained or started."""
    seen: list[Any] = []

    def train(loaded: Loaded) -> int:
        seen.append(loaded)
        return 0

    def ranks(number: int, program: list[str]) -> int:
        seen.append((number, program))
        return 3

    monkeypatch.setattr(shoal.cli.train, "_train", train)
    monkeypatch.setattr(shoal.cli.train, "run_local", ranks)
    return seen


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["train", "--help"], ["evaluate", "--help"], ["export", "--help"]]
)
def test_help_is_cheap_and_imports_no_torch(words: list[str]) -> None:
    code = (
        "import sys, atexit; from shoal.cli import main;"
        "atexit.register(lambda: print('TORCH' if 'torch' in sys.modules else 'LIGHT'));"
        "sys.exit(main(sys.argv[1:]))"
    )
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    after = os.times()
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "LIGHT"
    assert after.children_user + after.children_system - before.children_user - before.children_system <= 0.5


def test_help_lists_every_command_and_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"shoal {__version__}\n"
    assert main([]) == 2
    assert main(["tran"]) == 2
    assert "unknown command 'tran'" in capsys.readouterr().err


def test_refused_configuration_prints_the_message_and_returns_2(
    config_file: Path, capsys: pytest.CaptureFixture[str], started: list[Any]
) -> None:
    assert main(["train", str(config_file), "trainer.max_stps=3", "trainer.devices=0"]) == 2
    error = capsys.readouterr().err
    assert "2 errors" in error
    assert "trainer.max_stps = 3  [unknown-key]" in error
    assert started == []


def failing(error: Exception) -> Any:
    """A training that fails inside Shoal's own code, as far as a traceback shows."""
    source = "def train(loaded):\n    raise error"
    place = str(Path(shoal.cli.__file__).parents[1] / "train" / "plans.py")
    names: dict[str, Any] = {"error": error}
    exec(compile(source, place, "exec"), names)
    return names["train"]


@pytest.mark.parametrize("error", [ValueError("no such tokenizer"), RuntimeError("data of this step failed")])
def test_what_training_refuses_is_a_message_with_its_rank(
    error: Exception, config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shoal.cli.train, "_train", failing(error))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)
    assert main(["train", str(config_file)]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"shoal train (rank 3): {error}\n  [shoal/train/plans.py:2; SHOAL_DEBUG=1")
    monkeypatch.setenv("SHOAL_DEBUG", "1")
    with pytest.raises(type(error), match=str(error)):
        main(["train", str(config_file)])


def test_errors_of_other_libraries_keep_their_traceback(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(loaded: Loaded) -> int:
        raise ValueError("from elsewhere")

    monkeypatch.setattr(shoal.cli.train, "_train", train)
    with pytest.raises(ValueError, match="from elsewhere"):
        main(["train", str(config_file)])


@pytest.mark.parametrize("section", ["distributed", "step_scheduler"])
def test_llm_without_model_and_data_is_refused(
    section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "llm.yaml"
    file.write_text(yaml.safe_dump({section: {}}))
    assert main(["train", str(file)]) == 2
    error = capsys.readouterr().err
    assert "[llm-model]" in error and "[llm-dataset]" in error


def test_one_rank_runs_in_this_process(config_file: Path, started: list[Any]) -> None:
    assert main(["train", str(config_file), "trainer.max_steps=3"]) == 0
    assert started[0].config.trainer.max_steps == 3
    assert started[0].facts.world_size == 1


@pytest.mark.parametrize("words", [["--nproc-per-node", "2"], ["trainer.devices=2"]])
def test_several_ranks_are_started_after_the_check(
    words: list[str], config_file: Path, started: list[Any]
) -> None:
    assert main(["train", str(config_file), *words]) == 3
    assert started == [(2, ["-m", "shoal.cli", "train", str(config_file), *words])]


def test_overrides_and_options_may_be_mixed(config_file: Path, started: list[Any]) -> None:
    words = ["train", "--allow-commands", "trainer.max_steps=3", "--allow-target", "a.b"]
    assert main([words[0], str(config_file), *words[1:], "trainer.log_every_n_steps=1"]) == 0
    config = started[0].config
    assert (config.trainer.max_steps, config.trainer.log_every_n_steps) == (3, 1)
    assert config.options.allow_commands
    assert config.options.allow_targets == ("a.b",)


def test_started_ranks_train_where_they_are(
    config_file: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {"LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    assert main(["train", str(config_file), "trainer.num_nodes=2"]) == 0
    assert started[0].facts.world_size == 4
    assert started[0].config.trainer.devices == 2


def test_ranks_that_do_not_fit_the_nodes_are_refused(
    config_file: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, value in {"LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    assert main(["train", str(config_file)]) == 2
    assert "trainer.num_nodes = 1  [world-is-devices-times-nodes]" in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize(
    ("words", "rule"),
    [(["--nproc-per-node", "0"], "nproc-per-node"), (["trainer.num_nodes=2"], "nodes-need-launcher")],
)
def test_what_this_command_cannot_start_is_refused(
    words: list[str], rule: str, config_file: Path, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config_file), *words]) == 2
    assert f"[{rule}]" in capsys.readouterr().err
    assert started == []


def test_launchers_are_recognised() -> None:
    assert launched_world_size({}) is None
    assert launched_world_size({"LOCAL_RANK": "0", "WORLD_SIZE": "8"}) == 8
    assert launched_world_size({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "16"}) == 16
    # The batch script of a Slurm job is not a rank, although it has a process id.
    assert launched_world_size({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}) is None


def test_ranks_get_one_thread_and_their_status_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "name = os.environ['RANK']\n"
        f"pathlib.Path({str(tmp_path)!r}, name).write_text(os.environ['OMP_NUM_THREADS'] + ' '.join(sys.argv[1:]))\n"
    )
    assert run_local(2, [str(script), "a=1"]) == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["1a=1", "1a=1"]
    assert torchrun_command(2, ["x.py"])[-3:] == ["--nproc-per-node", "2", "x.py"]


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        # The first rank that fails decides; the launcher ends the other one.
        ("sys.exit(2) if rank == '1' else time.sleep(60)", 2),
        ("os.kill(os.getpid(), 9) if rank == '1' else time.sleep(60)", 128 + 9),
        ("os.kill(os.getppid(), 15) if rank == '1' else None; time.sleep(60)", 75),
    ],
)
def test_the_launcher_ends_as_its_ranks_end(
    ending: str, status: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "rank = os.environ['RANK']\n"
        "def save(*_): time.sleep(1); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        f"time.sleep(1); {ending}\n"
    )
    assert run_local(2, [str(script)]) == status
    assert "Traceback" not in capfd.readouterr().err


LAUNCH = "import sys; from shoal.launch.local import run_local; sys.exit(run_local(2, sys.argv[1:]))"


def launched(tmp_path: Path, script: str, prefix: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """A launcher of two ranks that run `script`, when they have come to its end once."""
    file = tmp_path / "rank.py"
    file.write_text(
        "import os, pathlib, signal, subprocess, sys, time\n"
        f"{script}\n"
        f"pathlib.Path({str(tmp_path)!r}, 'rank' + os.environ['RANK']).touch()\n"
        "time.sleep(60)\n"
    )
    launcher = subprocess.Popen([*prefix, sys.executable, "-c", LAUNCH, str(file)])
    end = time.monotonic() + 60
    while len(list(tmp_path.glob("rank[01]"))) < 2:
        assert time.monotonic() < end and launcher.poll() is None
        time.sleep(0.02)
    return launcher


@pytest.mark.parametrize("victim", ["launcher", "torchrun"])
def test_ranks_end_when_what_started_them_is_killed(victim: str, tmp_path: Path) -> None:
    # As a rank in the midst of a step: no signal that can be handled ends it.
    launcher = launched(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    started = psutil.Process(launcher.pid).children(recursive=True)
    try:
        assert len(started) == 3  # torchrun and its ranks
        (launcher if victim == "launcher" else started[0]).kill()
        assert survivors(started, 5) == []
        assert launcher.wait(10) == (-signal.SIGKILL if victim == "launcher" else 128 + signal.SIGKILL)
    finally:
        for process in survivors(started, 0):
            process.kill()
        launcher.kill()


@pytest.mark.parametrize(("prefix", "status"), [([], 75), (["nohup"], -signal.SIGKILL)])
def test_a_closed_terminal_lets_ranks_save_and_nohup_lets_them_go_on(
    prefix: list[str], status: int, tmp_path: Path
) -> None:
    launcher = launched(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))", prefix)
    try:
        launcher.send_signal(signal.SIGHUP)
        if prefix:
            with pytest.raises(subprocess.TimeoutExpired):
                launcher.wait(2)
            assert len(psutil.Process(launcher.pid).children(recursive=True)) == 3
            launcher.kill()
        assert launcher.wait(20) == status
    finally:
        launcher.kill()


def test_what_starts_after_the_death_of_its_parent_ends_at_once() -> None:
    # As if the one that it should be a child of had died between the fork and the check.
    done = subprocess.run(
        [sys.executable, "-m", "shoal.launch.tied", "0", "echo", "alive"], capture_output=True
    )
    assert (done.returncode, done.stdout) == (128 + signal.SIGKILL, b"")
    done = subprocess.run(tied_command(["echo", "alive"]), capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"alive\n")


def test_hydra_script_composes_and_refuses_like_the_command(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump(merged(base("speech"), {"trainer": {"max_steps": -1}}))
    )
    words = [f"--config-path={tmp_path}", "--config-name=mine", "+trainer.max_epochs=1", "++trainer.devics=1"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2, done.stderr
    assert "trainer.devics = 1  [unknown-key]" in done.stderr
    assert "run-ends" not in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize("command", ["evaluate", "generate"])
def test_ranks_of_an_evaluation_are_started_here(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(shoal.cli.arguments, "run_local", lambda number, program: seen.append(program) or 3)
    words = [command, "pretrained_name=somewhere", "--nproc-per-node", "2"]
    assert main(words) == 3
    assert seen == [["-m", "shoal.cli", *words]]
    assert main([*words[:-1], "0"]) == 2


def test_a_launched_rank_of_an_evaluation_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_on_ranks("evaluate", ["--nproc-per-node", "2"], 2) is None


def test_a_model_that_refuses_its_layout_names_the_key_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> int:
        raise ConfigError([Finding("tp-plan", "tp_size", 2, "1: no plan", "tp_size: 1")])

    monkeypatch.setitem(sys.modules, "shoal.train.llm_recipe", SimpleNamespace(run_llm_training=refuse))
    file = tmp_path / "run.yaml"
    sections = {"model": {"config": {"model_type": "llama"}}, "dataset": {"type": "text", "path": "x"}}
    file.write_text(yaml.safe_dump(merged(base("llm"), sections)))
    assert main(["train", str(file), "--nproc-per-node", "1"]) == 2
    assert "  distributed.tp_size = 2  [tp-plan]\n    limit:  1: no plan\n" in capsys.readouterr().err

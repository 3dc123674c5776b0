"""Runs a test function on N ranks by forking them from one process that has already imported everything.

Importing torch, transformers and lightning costs about seven CPU seconds; a fork costs a hundredth of
one. The session fixture `ranks` (conftest.py) starts ONE zygote process, which imports everything and then
only waits. For each test it forks N ranks, waits for their results and kills them. Whatever a rank does
(abort, hang, exit) costs that one test.

The zygote may be forked safely because it never opens a process group, starts a thread or runs autograd;
before every fork it checks that it still has a single thread.
"""

import ctypes
import dataclasses
import faulthandler
import functools
import gc
import importlib
import importlib.util
import io
import os
import pickle
import pkgutil
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Literal

ROOT = Path(__file__).resolve().parents[1]

# What a test is likely to touch. Each entry is a module some rank would otherwise import in every test again.
PRELOADED = (
    "numpy",
    "torch",
    "torch._dynamo",  # optimizers import it at their first step
    "torch.distributed",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "transformers.models.llama.modeling_llama",
    "transformers.models.parakeet.modeling_parakeet",
    "transformers.models.whisper.modeling_whisper",
    "lightning.pytorch",
    "lightning.pytorch.strategies",
    "lhotse",
    "peft",
    "pytest",
    "hypothesis",
)

POLL_SECONDS = 0.003
STACK_DUMP_SECONDS = 0.3


@dataclasses.dataclass(frozen=True)
class Request:
    """One test function to run; `arguments` stays pickled until the test's module is imported in the rank."""

    module: str
    file: str
    qualname: str
    arguments: bytes
    world_size: int
    init: bool
    timeout: float
    grace: float
    environment: dict[str, str]
    search_path: list[str]
    directory: str


@dataclasses.dataclass(frozen=True)
class RankOutcome:
    """What became of one rank.

    kind is "returned" (see value), "raised" (see error_type, message, traceback), "exited" (see exit_code),
    "signalled" (exit_code is minus the signal), "timed out", or "stopped" (killed some seconds after a peer
    failed). output is what the rank wrote to stdout and stderr, including the stacks of a rank that had to be
    killed.
    """

    rank: int
    kind: Literal["returned", "raised", "exited", "signalled", "timed out", "stopped"]
    value: Any = None
    error_type: str = ""
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None
    output: str = ""

    @property
    def failed(self) -> bool:
        return self.kind != "returned"

    def describe(self) -> str:
        """The failure in words, with the rank's traceback and captured output."""
        code = "" if self.exit_code is None else f" (exit code {self.exit_code})"
        lines = [f"--- rank {self.rank} {self.kind}{code} ---"]
        if self.traceback:
            lines.append(self.traceback.rstrip())
        if self.output.strip():
            lines += [f"--- output of rank {self.rank} ---", self.output.rstrip()]
        return "\n".join(lines)


class RanksFailed(AssertionError):
    """At least one rank did not return; `outcomes` has every rank's fate."""

    def __init__(self, outcomes: tuple[RankOutcome, ...]) -> None:
        self.outcomes = outcomes
        failed = [outcome.describe() for outcome in outcomes if outcome.failed]
        super().__init__(f"{len(failed)} of {len(outcomes)} ranks failed\n" + "\n".join(failed))


# ---------------------------------------------------------------------------------------------- pytest's side


class RankRunner:
    """The `ranks` fixture: `ranks(fn, world_size, *args) -> [result of rank 0, result of rank 1, ...]`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def __call__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        init: bool = True,
        expect_failure: bool = False,
        grace: float = 5.0,
    ) -> list[Any]:
        """Run fn(rank, world_size, *args) in world_size forked processes.

        fn: a module-level function of a test module.
        args: anything picklable.
        timeout: seconds until every rank still running is killed; also the process group's timeout.
        init: open a gloo process group first; otherwise only the environment variables that torchrun would
            set are there, with a free MASTER_PORT, and opening it is left to the code under test.
        expect_failure: return one RankOutcome per rank instead of the values; an error if no rank failed.
        grace: seconds that peers of a failed rank get to report something themselves.

        Tensors in results come back on the CPU, detached. Raises RanksFailed with every failed rank's
        traceback and output.
        """
        if "<" in fn.__qualname__:
            raise ValueError(
                f"{fn.__qualname__} is not a module-level function: a rank cannot find it by name"
            )
        request = Request(
            module=fn.__module__,
            file=fn.__code__.co_filename,
            qualname=fn.__qualname__,
            arguments=pickle.dumps(args),
            world_size=world_size,
            init=init,
            timeout=timeout,
            grace=grace,
            environment=dict(os.environ),
            search_path=list(sys.path),
            directory=os.getcwd(),
        )
        outcomes = tuple(self._ask(request))
        if not expect_failure:
            if any(outcome.failed for outcome in outcomes):
                raise RanksFailed(outcomes)
            return [outcome.value for outcome in outcomes]
        if not any(outcome.failed for outcome in outcomes):
            raise AssertionError(f"every one of {world_size} ranks returned, but a failure was expected")
        return list(outcomes)

    def _ask(self, request: Request) -> list[RankOutcome]:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            _send(process.stdin, request)
            # The first request also waits for the imports, which take minutes on a busy machine.
            readable, _, _ = select.select([process.stdout], [], [], request.timeout + request.grace + 300)
            reply = _receive(process.stdout) if readable else None
        except (BrokenPipeError, EOFError):
            reply = None
        except BaseException:  # interrupted: the reply still to come would answer the wrong request
            self.close()
            raise
        if isinstance(reply, list):
            return [dataclasses.replace(o, value=pickle.loads(o.value)) if not o.failed else o for o in reply]
        reason = reply or "the zygote process died or did not answer"
        log = self._log()
        self.close()
        raise RuntimeError(f"{reason}\n{log}")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join(path for path in [str(ROOT), *sys.path] if path),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                # Asking CUDA itself for the number of devices would make every forked rank unable to use it.
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            }
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from tests.zygote import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environment,
            )
        return self._process

    def _log(self) -> str:
        assert self._errors is not None
        self._errors.seek(0)
        return self._errors.read()[-8000:].decode(errors="replace")

    def close(self) -> None:
        """End the zygote; the next call starts a new one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None


def _send(stream: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    def exactly(size: int) -> bytes:
        data = stream.read(size)
        if len(data) < size:
            raise EOFError
        return data

    (size,) = struct.unpack("<Q", exactly(8))
    return pickle.loads(exactly(size))


# ------------------------------------------------------------------------------------------ the zygote's side


def serve() -> None:
    """Import everything, then answer requests on stdin until it closes. Runs as a process of its own."""
    _die_with_parent()
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # an import that prints must not write into the protocol
    _preload()
    while True:
        try:
            request = _receive(requests)
        except EOFError:
            return
        _send(replies, _multi_threaded() or _run(request, private=(requests, replies)))


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, so that no run leaves ranks behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _preload() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    import shoal

    for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except Exception:  # the ranks that need this module will fail to import it, with its traceback
            traceback.print_exc()
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # keep the collector from touching, and so copying, pages shared with the ranks


def _multi_threaded() -> str | None:
    tasks = Path("/proc/self/task")
    if tasks.is_dir() and (count := len(list(tasks.iterdir()))) > 1:
        return (
            f"the zygote has {count} threads, so it cannot be forked safely: a preloaded module started one"
        )
    return None


def _run(request: Request, private: tuple[IO[bytes], ...]) -> list[RankOutcome]:
    scratch = Path(tempfile.mkdtemp(prefix="shoal-ranks-"))
    port = _free_port()
    pids = []
    for rank in range(request.world_size):
        pid = os.fork()
        if pid == 0:
            _be_rank(request, rank, port, scratch, private)
        pids.append(pid)
    try:
        return _collect(request, pids, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _free_port() -> int:
    """A port for a rendezvous that rank 0 opens some time later.

    Not one that the kernel chooses: it would give it to the next outgoing connection of any process as well.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32768)  # below the range of outgoing connections
        with socket.socket() as sock:
            try:
                sock.bind(("", port))
            except OSError:  # somebody listens there
                continue
            return port


def _collect(request: Request, pids: list[int], scratch: Path) -> list[RankOutcome]:
    """Wait until every rank has reported, died or run out of time; then kill whatever is left of each.

    A rank that has reported waits to be killed instead of exiting: an exit would reset connections on which a
    slower peer may still be reading.
    """
    outcomes: dict[int, RankOutcome] = {}
    deadline, late = time.monotonic() + request.timeout, "timed out"
    while len(outcomes) < len(pids) and time.monotonic() < deadline:
        for rank, pid in enumerate(pids):
            if rank in outcomes or (outcome := _outcome(rank, pid, scratch)) is None:
                continue
            outcomes[rank] = outcome
            if outcome.failed and time.monotonic() + request.grace < deadline:
                deadline, late = time.monotonic() + request.grace, "stopped"
        time.sleep(POLL_SECONDS)
    unfinished = [rank for rank in range(len(pids)) if rank not in outcomes]
    for rank in unfinished:
        os.kill(pids[rank], signal.SIGUSR1)  # faulthandler: write the stacks of all threads
    if unfinished:
        time.sleep(STACK_DUMP_SECONDS)
    for pid in pids:
        _kill_group(pid)
    for rank in unfinished:
        outcomes[rank] = RankOutcome(rank, late)  # type: ignore[arg-type]
    return [dataclasses.replace(outcomes[rank], output=_output(rank, scratch)) for rank in range(len(pids))]


def _outcome(rank: int, pid: int, scratch: Path) -> RankOutcome | None:
    exited = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    report = scratch / f"report.{rank}"
    if report.exists():
        return pickle.loads(report.read_bytes())  # type: ignore[no-any-return]
    if exited is None:
        return None
    if exited.si_code == os.CLD_EXITED:
        return RankOutcome(rank, "exited", exit_code=exited.si_status)
    return RankOutcome(rank, "signalled", exit_code=-exited.si_status)


def _output(rank: int, scratch: Path) -> str:
    path = scratch / f"output.{rank}"
    return path.read_bytes()[-20000:].decode(errors="replace") if path.exists() else ""


def _kill_group(pid: int) -> None:
    """Kill a rank together with the processes it started (data loader workers), then reap it."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)  # it had not come as far as making its own group
    os.waitpid(pid, 0)


# --------------------------------------------------------------------------------------------- a rank's side


def _be_rank(request: Request, rank: int, port: int, scratch: Path, private: tuple[IO[bytes], ...]) -> None:
    """The whole life of a forked rank; never returns."""
    try:
        os.setpgid(0, 0)
        _die_with_parent()
        for stream in private:
            os.close(stream.fileno())
        output = os.open(scratch / f"output.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable(all_threads=True)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        outcome = _call(request, rank, port, scratch)
        sys.stdout.flush()
        sys.stderr.flush()
        partial = scratch / f"partial.{rank}"
        partial.write_bytes(pickle.dumps(outcome))
        partial.rename(scratch / f"report.{rank}")
        while True:
            signal.pause()
    finally:  # only an error in the lines above comes here
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)


def _call(request: Request, rank: int, port: int, scratch: Path) -> RankOutcome:
    try:
        _prepare(request, rank, port)
        if request.init:
            _open_process_group(request, rank, scratch)
        function: Any = functools.reduce(getattr, request.qualname.split("."), _test_module(request))
        value = function(rank, request.world_size, *pickle.loads(request.arguments))
        return RankOutcome(rank, "returned", value=_pickle_result(value))
    except BaseException as error:
        name, text = type(error).__name__, traceback.format_exc()
        return RankOutcome(rank, "raised", error_type=name, message=str(error), traceback=text)


def _prepare(request: Request, rank: int, port: int) -> None:
    import numpy
    import torch

    environment = request.environment | {
        "RANK": str(rank),
        "WORLD_SIZE": str(request.world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(request.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(request.directory)
    sys.path[:] = request.search_path
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def _open_process_group(request: Request, rank: int, scratch: Path) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(scratch / "store"), request.world_size)
    limit = timedelta(seconds=request.timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=request.world_size, timeout=limit)


def _test_module(request: Request) -> ModuleType:
    """Import the test's module under the name that pytest gave it, so that pickled classes of it resolve."""
    if request.module not in sys.modules:
        spec = importlib.util.spec_from_file_location(request.module, request.file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[request.module] = module
        spec.loader.exec_module(module)
    return sys.modules[request.module]


def _pickle_result(value: Any) -> bytes:
    """Pickle a rank's result, every tensor in it detached, on the CPU and without the rest of its storage."""
    import torch
    from torch.distributed.tensor import DTensor

    class Pickler(pickle.Pickler):
        def reducer_override(self, item: Any) -> Any:
            if not isinstance(item, torch.Tensor):
                return NotImplemented
            if isinstance(item, DTensor):
                raise TypeError("a rank returned a DTensor: return its full_tensor() or to_local() instead")
            return item.detach().cpu().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    buffer = io.BytesIO()
    Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()

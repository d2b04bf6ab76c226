"""Start a train stage on the ranks of this machine.

With one rank it runs in this process; with more, torchrun's agent starts `run_rank(ORDER.json)` in a process per rank
and ends them all as soon as one fails. Orders and results are JSON files in a temporary folder:

    order.json      config and directories
    result.json     what rank 0 returned
    error-1.json    what rank 1 died of, and when
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tasks.config import RunConfig
from tasks.faults import RecoverableError
from tasks.memory import available_bytes, check_memory, device_bytes, training_needs
from tasks.train.stage import Directories, TrainResult, train_policy

ROOT = Path(__file__).parents[2]
LOST = ("StallError", "RecoverableError", "imed out", "Connection closed", "Connection reset")


class RankError(RuntimeError):
    """A rank failed; the message is that of the first one to fail."""


class LostRankError(RankError, RecoverableError):
    """A rank was killed, or waited in vain for another: a retry may go well."""


def train_on_ranks(config: RunConfig, directories: Directories) -> TrainResult:
    """`train_policy` on `train.ranks` ranks of this machine; returns rank 0's result. Raises RankError."""
    on_gpu = device_bytes()
    needs = training_needs(config, directories.policy, on_gpu is not None)
    check_memory("train", needs, available_bytes() if on_gpu is None else on_gpu)
    if config.train.ranks == 1:
        return train_policy(config, directories)
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.train.ranks,
        run_id="train",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
    )
    program = "import sys; sys.path.insert(0, sys.argv[1]); from tasks.train.launch import run_rank; run_rank()"
    with tempfile.TemporaryDirectory(prefix="train-") as folder, _signal_handlers_kept():
        content = {"config": config.model_dump(mode="json"), "directories": dataclasses.asdict(directories)}
        Path(folder, "order.json").write_text(json.dumps(content))
        try:
            elastic_launch(launch, sys.executable)("-c", program, str(ROOT), folder)
        except ChildFailedError as error:
            cause = _cause(error.failures, folder, config.train.ranks)
            lost = "was killed" in cause or any(name in cause for name in LOST)
            raise (LostRankError if lost else RankError)(cause) from None
        return TrainResult(**json.loads(Path(folder, "result.json").read_text()))


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """torchrun's agent sets signal handlers and leaves them; this process goes on afterwards."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _cause(failures: Mapping[int, ProcessFailure], folder: str, ranks: int) -> str:
    """What the first rank to fail died of. The others die of its silence or of the agent's SIGTERM, a little later."""
    reports = [json.loads(path.read_text()) for path in Path(folder).glob("error-*.json")]
    reports.sort(key=lambda report: report["monotonic_ns"])
    causes = [
        f"rank {rank} of {ranks} was killed: {failure.message}"
        for rank, failure in failures.items()
        if failure.exitcode in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)
    ]
    causes += [f"rank {report['rank']} of {ranks} failed: {report['message']}" for report in reports[:1]]
    return "; ".join(causes) or f"ranks failed without a message: {dict(failures)}"


def run_rank() -> None:
    """What a rank runs; its folder is the program's last argument."""
    folder, rank = Path(sys.argv[-1]), int(os.environ["RANK"])
    cores = os.cpu_count() or 1
    os.sched_setaffinity(0, range(cores))  # an engine in the parent may have bound it to some of them
    torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    try:
        content = json.loads((folder / "order.json").read_text())
        result = train_policy(RunConfig.model_validate(content["config"]), Directories(**content["directories"]))
    except BaseException as error:
        report = {"rank": rank, "monotonic_ns": time.monotonic_ns(), "message": f"{type(error).__name__}: {error}"}
        (folder / f"error-{rank}.json").write_text(json.dumps(report))
        raise
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result._asdict()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all is on disk; on an orderly exit gloo's threads now and then abort the process

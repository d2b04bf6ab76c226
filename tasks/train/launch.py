"""Start a train stage on the ranks of this machine.

With one rank it runs in this process; with more, torchrun's agent starts `python -m tasks.train.launch ORDER.json` once
per rank and ends them all as soon as one fails.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tasks.config import RunConfig
from tasks.train.stage import Directories, train_policy


class RankError(RuntimeError):
    """A rank failed; the message is that of the first one to fail."""


def train_on_ranks(config: RunConfig, directories: Directories) -> dict[str, float]:
    """`train_policy` on `train.ranks` ranks of this machine; returns rank 0's metrics. Raises RankError."""
    if config.train.ranks == 1:
        return train_policy(config, directories)
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.train.ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    with tempfile.TemporaryDirectory(prefix="train-") as folder:
        order, metrics = Path(folder, "order.json"), Path(folder, "metrics.json")
        content = {
            "config": config.model_dump(),
            "directories": dataclasses.asdict(directories),
            "metrics": str(metrics),
        }
        order.write_text(json.dumps(content))
        try:
            elastic_launch(launch, sys.executable)("-m", "tasks.train.launch", str(order))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise RankError(f"rank {rank} of {config.train.ranks} failed: {failure.message}") from error
        return json.loads(metrics.read_text())


@record
def main(order: str) -> None:
    """What a rank runs."""
    import torch

    cores = os.cpu_count() or 1
    os.sched_setaffinity(0, range(cores))  # an engine in the parent may have bound it to some of them
    torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    content = json.loads(Path(order).read_text())
    metrics = train_policy(RunConfig.model_validate(content["config"]), Directories(**content["directories"]))
    if int(os.environ["RANK"]) == 0:
        Path(content["metrics"]).write_text(json.dumps(metrics))


if __name__ == "__main__":
    main(sys.argv[1])

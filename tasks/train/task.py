"""The train stage as a Flyte task."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from tasks.carry_over.shards import read_shards
from tasks.config import RunConfig
from tasks.storage import stage_output


class Trained(NamedTuple):
    """`policy`: the next version, or the same one if there was nothing to train on; `version`: which that is."""

    policy: FlyteDirectory
    optimizer: FlyteDirectory | None
    version: int
    metrics: dict[str, float]


@task
def train(
    config: RunConfig, iteration: int, policy: FlyteDirectory, optimizer: FlyteDirectory | None, batch: FlyteDirectory
) -> Trained:
    """Update `policy` on the batch. Without an update there is no new version."""
    from tasks.train.launch import train_on_ranks
    from tasks.train.stage import Directories

    shards = read_shards(batch.download())
    version = shards.manifest.extra["version"]
    if not len(shards):
        return Trained(policy, optimizer, version, {"train/updates": 0.0, "train/seconds": 0.0})
    with (
        stage_output(config, "policy", version + 1) as new_policy,
        stage_output(config, "optimizer", iteration + 1) as new_optimizer,
    ):
        directories = Directories(
            policy=policy.download(),
            optimizer=None if optimizer is None else optimizer.download(),
            batch=batch.download(),
            new_policy=new_policy.path,
            new_optimizer=new_optimizer.path,
        )
        metrics = train_on_ranks(config, directories)
    if not metrics["train/updates"]:
        return Trained(policy, optimizer, version, metrics)
    return Trained(new_policy.directory, new_optimizer.directory, version + 1, metrics)

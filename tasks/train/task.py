"""The train stage as a Flyte task."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from tasks.carry_over.shards import read_shards
from tasks.config import RunConfig
from tasks.faults import task_faults
from tasks.report.decks import publish_deck, train_deck
from tasks.report.progress import chatter_to
from tasks.storage import local_log, stage_output


class Trained(NamedTuple):
    """`policy`: the next version, or the same one if there was nothing to train on; `version`: which that is."""

    policy: FlyteDirectory
    optimizer: FlyteDirectory | None
    version: int
    metrics: dict[str, float]


@task(retries=3, enable_deck=True, deck_fields=())
def train(
    config: RunConfig, iteration: int, policy: FlyteDirectory, optimizer: FlyteDirectory | None, batch: FlyteDirectory
) -> Trained:
    """Update `policy` on the batch. Without an update there is no new version."""
    with task_faults(config.run_directory), chatter_to(local_log(config)):
        return _train(config, iteration, policy, optimizer, batch)


def _train(
    config: RunConfig, iteration: int, policy: FlyteDirectory, optimizer: FlyteDirectory | None, batch: FlyteDirectory
) -> Trained:
    from tasks.train.launch import train_on_ranks
    from tasks.train.stage import Directories

    shards = read_shards(batch.download())
    version = shards.manifest.extra["version"]
    if not len(shards):
        nothing = {"train/updates": 0.0, "train/seconds": 0.0}
        publish_deck(config, "train", iteration, train_deck([], nothing))
        return Trained(policy, optimizer, version, nothing)
    with (
        stage_output(config, "policy", version + 1) as new_policy,
        stage_output(config, "optimizer", version + 1) as new_optimizer,
    ):
        directories = Directories(
            policy=policy.download(),
            optimizer=None if optimizer is None else optimizer.download(),
            batch=batch.download(),
            new_policy=new_policy.path,
            new_optimizer=new_optimizer.path,
            progress=f"{config.run_directory}/training/{iteration:04d}",
        )
        metrics, updates = train_on_ranks(config, directories)
    publish_deck(config, "train", iteration, train_deck(updates, metrics))
    if not metrics["train/updates"]:
        return Trained(policy, optimizer, version, metrics)
    return Trained(new_policy.directory, new_optimizer.directory, version + 1, metrics)

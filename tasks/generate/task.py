"""The generate stage as a Flyte task."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from tasks.config import RunConfig
from tasks.generate.stage import generate_rollouts
from tasks.storage import stage_output


class Generated(NamedTuple):
    """`rollouts`: every trajectory of the iteration, as Arrow shards."""

    rollouts: FlyteDirectory
    metrics: dict[str, float]


@task
def generate(config: RunConfig, iteration: int, policy: FlyteDirectory, carry: FlyteDirectory) -> Generated:
    """Continue the carried trajectories and start new ones under `policy`, until enough groups are ready."""
    with stage_output(config, "rollouts", iteration) as output:
        metrics = generate_rollouts(config, iteration, policy.download(), carry.download(), output.path)
    return Generated(output.directory, metrics)

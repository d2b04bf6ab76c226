"""The carry-over stage as a Flyte task."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from tasks.carry_over.stage import carry_over_rollouts
from tasks.config import RunConfig
from tasks.storage import stage_output


class Kept(NamedTuple):
    """`batch`: what is trained on now; `carry`: what the next iteration continues."""

    batch: FlyteDirectory
    carry: FlyteDirectory
    metrics: dict[str, float]


@task
def carry_over(config: RunConfig, iteration: int, rollouts: FlyteDirectory) -> Kept:
    """Sort the trajectories of an iteration into the training batch, what is carried on, and what is let go."""
    with stage_output(config, "batch", iteration) as batch, stage_output(config, "carry", iteration + 1) as carry:
        metrics = carry_over_rollouts(config, iteration, rollouts.download(), batch.path, carry.path)
    return Kept(batch.directory, carry.directory, metrics)

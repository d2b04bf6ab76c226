"""The carry-over stage as a Flyte task."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from tasks.carry_over.stage import carry_over_rollouts
from tasks.config import RunConfig
from tasks.faults import task_faults
from tasks.report.decks import carry_over_deck, publish_deck
from tasks.storage import stage_output, write_table


class Kept(NamedTuple):
    """`batch`: what is trained on now; `carry`: what the next iteration continues."""

    batch: FlyteDirectory
    carry: FlyteDirectory
    metrics: dict[str, float]


@task(retries=3, enable_deck=True, deck_fields=())
def carry_over(config: RunConfig, iteration: int, rollouts: FlyteDirectory) -> Kept:
    """Sort the trajectories of an iteration into the training batch, what is carried on, and what is let go."""
    with (
        task_faults(config.run_directory),
        stage_output(config, "batch", iteration) as batch,
        stage_output(config, "carry", iteration + 1) as carry,
    ):
        result = carry_over_rollouts(config, iteration, rollouts.download(), batch.path, carry.path)
        write_table(f"{config.run_directory}/responses/{iteration:04d}.parquet", result.responses)
    publish_deck(config, "carry-over", iteration, carry_over_deck(result.metrics))
    return Kept(batch.directory, carry.directory, result.metrics)

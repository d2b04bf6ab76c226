"""The generate stage as a Flyte task."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from tasks.config import RunConfig
from tasks.faults import task_faults
from tasks.generate.stage import generate_rollouts
from tasks.report.decks import publish_deck
from tasks.report.progress import chatter_to
from tasks.storage import local_log, stage_output


class Generated(NamedTuple):
    """`rollouts`: every trajectory of the iteration, as Arrow shards."""

    rollouts: FlyteDirectory
    metrics: dict[str, float]


@task(retries=3, enable_deck=True, deck_fields=())
def generate(config: RunConfig, iteration: int, policy: FlyteDirectory, carry: FlyteDirectory) -> Generated:
    """Continue the carried trajectories and start new ones under `policy`, until enough groups are ready."""
    with (
        task_faults(config.run_directory),
        chatter_to(local_log(config)),
        stage_output(config, "rollouts", iteration) as output,
    ):
        metrics, deck = generate_rollouts(config, iteration, policy.download(), carry.download(), output.path)
    if deck is not None:
        publish_deck(config, "generate", iteration, deck)
    return Generated(output.directory, metrics)

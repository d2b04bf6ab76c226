"""The evaluate stage as a Flyte task."""

from __future__ import annotations

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from tasks.config import RunConfig
from tasks.evaluate.stage import evaluate_policy


@task
def evaluate(config: RunConfig, policy: FlyteDirectory) -> dict[str, float]:
    """Accuracy of `policy` on the held-out prompts."""
    return evaluate_policy(config, policy.download())

"""The evaluate stage as a Flyte task."""

from __future__ import annotations

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from tasks.config import RunConfig
from tasks.evaluate.stage import evaluate_policy
from tasks.faults import task_faults
from tasks.report.progress import chatter_to
from tasks.storage import local_log


@task(retries=3)
def evaluate(config: RunConfig, policy: FlyteDirectory) -> dict[str, float]:
    """Accuracy of `policy` on the held-out prompts."""
    with task_faults(config.run_directory), chatter_to(local_log(config)):
        return evaluate_policy(config, policy.download())

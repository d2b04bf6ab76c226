"""Evaluation as Flyte tasks: the stage of a run, and what is around it when a checkpoint is evaluated alone."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from tasks.config import ConfigError, RunConfig
from tasks.evaluate.stage import evaluate_policy
from tasks.faults import task_faults
from tasks.policy import MANIFEST, publish_initial_policy
from tasks.report.lines import evaluation_lines
from tasks.report.progress import chatter_to, say
from tasks.rewards.scorers import check_scorers
from tasks.storage import (
    existing_directory,
    fetch_model,
    free_directory,
    local_log,
    stage_output,
    write_arrow,
    write_json,
)
from tasks.validate import check_data


class Subject(NamedTuple):
    """What is evaluated. `config` has the final name of the directory that the answers go to."""

    config: RunConfig
    policy: FlyteDirectory


class Evaluated(NamedTuple):
    """`directory`: holds `evaluation.json` and every answer, as `answers/0000/<set>.arrow`."""

    directory: str
    metrics: dict[str, float]


@task(retries=3)
def evaluate(config: RunConfig, iteration: int, policy: FlyteDirectory) -> dict[str, float]:
    """Accuracy of `policy` on the held-out prompts; every answer is kept as `answers/<iteration>/<set>.arrow`."""
    with task_faults(config.run_directory), chatter_to(local_log(config)):
        metrics, answers = evaluate_policy(config, policy.download())
        for label, table in answers.items():
            write_arrow(f"{config.run_directory}/answers/{iteration:04d}/{label}.arrow", table)
        return metrics


@task(retries=3)
def prepare_evaluation(config: RunConfig, checkpoint: str) -> Subject:
    """Check data and scorers, and make a policy of `checkpoint` (default: `model.path`) if it is none yet."""
    if not config.data.heldout:
        raise ConfigError("data.heldout names no prompts to evaluate on; set it to a file, or a list of sets")
    check_scorers(config.reward)
    directory = free_directory(f"{config.run_directory}-evaluation")
    config = config.model_copy(update={"name": directory.rsplit("/", 1)[-1]})
    path = checkpoint or config.model.path
    with task_faults(path):
        model_directory = fetch_model(path, config.model.revision if path == config.model.path else None)
        check_data(config, model_directory, config.data.heldout)
        if Path(model_directory, MANIFEST).exists():
            return Subject(config, existing_directory(path))
        with stage_output(config, "policy", 0) as policy:
            publish_initial_policy(model_directory, policy.path)
        return Subject(config, policy.directory)


@task(retries=3)
def conclude_evaluation(config: RunConfig, checkpoint: str, metrics: dict[str, float]) -> Evaluated:
    """Write down what was measured, and say it."""
    with task_faults(config.run_directory):
        facts = {"checkpoint": checkpoint or config.model.path, "recipe": config.model_dump(mode="json")}
        write_json(f"{config.run_directory}/evaluation.json", {"metrics": metrics} | facts)
    for line in evaluation_lines(metrics):
        say(line)
    say(f"every answer is in {config.run_directory}/answers/")
    return Evaluated(config.run_directory, metrics)

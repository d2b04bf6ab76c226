"""The small tasks around the loop: check and start a run, record an iteration, conclude."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory

from tasks.carry_over.shards import ShardError, read_shards, write_shards
from tasks.config import ConfigError, RunConfig
from tasks.faults import task_faults
from tasks.policy import MANIFEST, OPTIMIZER_MANIFEST, first_damage, publish_initial_policy
from tasks.prompts import warm_prompts
from tasks.report.lines import evaluation_lines, iteration_lines
from tasks.report.metrics import describe
from tasks.report.progress import say
from tasks.report.report import summary, write_report
from tasks.report.trackers import end_tracking, track
from tasks.resume import changed_settings, check_carry, fingerprints
from tasks.rewards.scorers import check_scorers
from tasks.storage import (
    RunState,
    existing_directory,
    fetch_model,
    has_samples,
    latest_state,
    read_json,
    read_metrics,
    remove_superseded,
    set_aside,
    stage_output,
    states,
    write_json,
    write_state,
)
from tasks.validate import check_data


class Start(NamedTuple):
    """What the first iteration of this execution starts from. `config` has the run's final name."""

    config: RunConfig
    iteration: int
    policy: FlyteDirectory
    optimizer: FlyteDirectory | None
    carry: FlyteDirectory


class Result(NamedTuple):
    """`run_directory` holds everything: policy, metrics.parquet, report.html and the state to resume from."""

    run_directory: str
    policy: FlyteDirectory


@task(retries=3)
def prepare(config: RunConfig) -> Start:
    """Check everything that can be checked without an engine, then make version 0, or find the state to resume from."""
    check_scorers(config.reward)
    if config.keep_best is not None and describe(config.keep_best) is None:
        raise ConfigError(f"keep_best = {config.keep_best!r} is no metric; all of them are in tasks/report/metrics.py")
    with task_faults(config.run_directory):
        return _start(config) if config.resume is None else _resume(config)


def _start(config: RunConfig) -> Start:
    config = _with_free_name(config)
    with stage_output(config, "policy", 0) as policy:
        publish_initial_policy(fetch_model(config.model.path, config.model.revision), policy.path)
        check_data(config, policy.path, (*config.data.train, *config.data.heldout))
    with stage_output(config, "carry", 0) as carry:
        write_shards([], carry.path)
    write_json(f"{config.run_directory}/recipe.json", config.model_dump(mode="json"))
    write_state(config.run_directory, RunState(iteration=0, policy="policy/0000", carry="carry/0000"))
    return Start(config, 0, policy.directory, None, carry.directory)


def _with_free_name(config: RunConfig) -> RunConfig:
    """A run never writes into another: where the name is taken, the next of name-2, name-3, … is used.

    A run that has sampled nothing yet does not take its name: this task may be a retry of the one that began it.
    """
    name, number = config.name, 1
    while has_samples(config.run_directory):
        number += 1
        config = config.model_copy(update={"name": f"{name}-{number}"})
    return config


def _resume(config: RunConfig) -> Start:
    base = config.run_directory if config.resume in ("latest", "latest-good") else config.resume.rstrip("/")
    state = _latest_good_state(base) if config.resume == "latest-good" else latest_state(base)
    if state is None:
        raise ConfigError(f"resume = {config.resume!r}: there is no run to continue (no state/*.json in {base})")
    if state.iteration == config.iterations:
        say(f"all {config.iterations} iterations of {base} are done; raise iterations to train on")
    if state.iteration > config.iterations:
        raise ConfigError(
            f"resume = {config.resume!r}: its {state.iteration} iterations are done; raise iterations "
            f"(now {config.iterations}) to train on"
        )
    policy = existing_directory(f"{base}/{state.policy}")
    model_directory = fetch_model(f"{base}/{state.policy}")
    check_data(config, model_directory, (*config.data.train, *config.data.heldout))
    settings = config.model_dump(mode="json")
    changed = changed_settings(read_json(f"{base}/recipe.json") or settings, settings)
    _, sets = warm_prompts(config.data.train, model_directory, config)
    carry = f"{base}/{state.carry}"
    saved = read_shards(carry).manifest.fingerprints
    check_carry(carry, saved, fingerprints(config, model_directory, sets), changed)
    for key, change in changed.items():
        say(f"changed since then: {key}: {change}")
    write_json(f"{config.run_directory}/recipe.json", settings)
    optimizer = None if state.optimizer is None else existing_directory(f"{base}/{state.optimizer}")
    say(f"resuming {base} at iteration {state.iteration}")
    return Start(config, state.iteration, policy, optimizer, existing_directory(carry))


def _latest_good_state(base: str) -> RunState | None:
    """The newest state of which every file is as it was written; damaged newer ones are said and set aside."""
    for state in reversed(states(base)):
        damage = first_damage(f"{base}/{state.policy}", MANIFEST) or _damaged_shards(f"{base}/{state.carry}")
        if damage is None and state.optimizer is not None:
            damage = first_damage(f"{base}/{state.optimizer}", OPTIMIZER_MANIFEST)
        if damage is None:
            return state
        say(f"state {state.iteration} of {base} is damaged and set aside: {damage}")
        set_aside(base, state)
    return None


def _damaged_shards(url: str) -> str | None:
    try:
        for _ in read_shards(url):
            pass
    except ShardError as error:
        return str(error)
    return None


@task(retries=3, enable_deck=True, deck_fields=())
def record(
    config: RunConfig,
    iteration: int,
    version: int,
    optimizer: FlyteDirectory | None,
    metrics: list[dict[str, float]],
) -> dict[str, float]:
    """Write down what the iteration measured, the state from which the next one can start, and the renewed report.

    `version`: of the policy that the iteration ended with.
    """
    merged = {"iteration": float(iteration)} | {name: value for part in metrics for name, value in part.items()}
    state = RunState(
        iteration=iteration + 1,
        policy=f"policy/{version:04d}",
        carry=f"carry/{iteration + 1:04d}",
        optimizer=None if optimizer is None else f"optimizer/{version:04d}",
    )
    with task_faults(config.run_directory):
        write_json(f"{config.run_directory}/metrics/{iteration:04d}.json", merged)
        write_state(config.run_directory, state)
        history = read_metrics(config.run_directory)
        best = _name_best(config, history)
        remove_superseded(config.run_directory, config.keep_last, config.keep_every, best)
        for line in iteration_lines(merged):
            say(line)
        Deck("report", write_report(config, history))
    track(config, merged)
    return merged


def _name_best(config: RunConfig, history: Sequence[Mapping[str, float]]) -> int | None:
    """The iteration that starts with the best policy so far by `keep_best`, written down; None if none was measured."""
    measured = [row for row in history if not math.isnan(row.get(config.keep_best, math.nan))]
    if not measured:
        return None
    best = max(measured, key=lambda row: row[config.keep_best])
    iteration = int(best["iteration"])
    state = next((state for state in states(config.run_directory) if state.iteration == iteration), None)
    if state is not None:
        facts = {"metric": config.keep_best, "value": best[config.keep_best], "policy": state.policy}
        write_json(f"{config.run_directory}/best.json", facts | {"iteration": iteration})
    return iteration


@task(retries=3, enable_deck=True, deck_fields=())
def conclude(
    config: RunConfig, policy: FlyteDirectory, recorded: list[dict[str, float]], final: list[dict[str, float]]
) -> Result:
    """Collect the metrics of the whole run as a table and a report, and say where everything is.

    `final`: the evaluation of the last policy, if there is one.
    """
    for measured in final:
        last = {"iteration": float(config.iterations)} | measured
        write_json(f"{config.run_directory}/metrics/{config.iterations:04d}.json", last)
        for line in evaluation_lines(last):
            say(line)
        track(config, last)
    with task_faults(config.run_directory):
        history = read_metrics(config.run_directory)
        _name_best(config, history)
        Deck("report", write_report(config, history))
    end_tracking()
    say(summary(history))
    say(f"{len(recorded)} iterations done; everything is in {config.run_directory}/, start with report.html")
    return Result(config.run_directory, policy)

"""The small tasks around a comparison: which runs it needs, and what they show together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flytekit import Deck, task

from tasks.config import ConfigError, RunConfig
from tasks.report.comparison import comparison_lines, read_arm, write_comparison
from tasks.report.progress import say
from tasks.storage import free_directory


class Comparison(NamedTuple):
    """`directory` holds comparison.html, its figures as files, and the numbers behind them as parquet."""

    directory: str


class Arm(NamedTuple):
    name: str
    seed: int
    config: RunConfig


def comparison_directory(config: RunConfig) -> str:
    """Where a new comparison goes: `<output>/<name>-compare`, or the first such name with a number that is free."""
    return free_directory(f"{config.run_directory}-compare")


def arms_of(config: RunConfig, directory: str) -> list[Arm]:
    """Every run of the comparison; arms take turns in going first, so that no drift of the machine favours one.

    Raises ConfigError naming the arm whose settings are wrong, before anything runs.
    """
    names = list(config.compare.arms)
    if len(names) < 2:
        raise ConfigError(f"compare.arms has {len(names)} arm; name two or more to compare")
    arms = []
    for number, seed in enumerate(config.compare.seeds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            changes = {"name": f"{name}-{seed}", "seed": seed, "output": directory, "resume": None}
            settings = _merged(config.model_dump(mode="json"), config.compare.arms[name])
            try:
                arms.append(Arm(name, seed, RunConfig.model_validate(settings | changes)))
            except ConfigError as error:
                raise ConfigError(f"compare.arms.{name}: {error}") from None
    if config.iterations <= config.compare.warm_up:
        raise ConfigError(
            f"compare.warm_up = {config.compare.warm_up} leaves none of the {config.iterations} iterations; raise "
            "iterations, or lower it"
        )
    return arms


def _merged(settings: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with some of them changed, section by section."""
    return settings | {
        name: _merged(settings[name], value)
        if isinstance(value, Mapping) and isinstance(settings.get(name), dict)
        else value
        for name, value in changes.items()
    }


@task(retries=3, enable_deck=True, deck_fields=())
def conclude_comparison(
    config: RunConfig, directory: str, arms: list[str], seeds: list[int], runs: list[str]
) -> Comparison:
    """Compare finished runs: of each its arm, its seed and its directory."""
    finished = [read_arm(*run) for run in zip(arms, seeds, runs, strict=True)]
    finished.sort(key=lambda run: list(config.compare.arms).index(run.arm))
    Deck("comparison", write_comparison(config, directory, finished))
    for line in comparison_lines(config, finished):
        say(line)
    say(f"everything is in {directory}/, start with comparison.html")
    return Comparison(directory)

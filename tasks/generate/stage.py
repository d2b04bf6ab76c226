"""A whole generate stage on local directories: read the carry, sample, score, write every trajectory."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from tasks.carry_over.shards import Shards, read_shards, write_shards
from tasks.config import RunConfig
from tasks.generate.engine import Engine, warm_engine
from tasks.generate.flush import Flusher, Origin, continued, read_if_from
from tasks.generate.rollout import Sampler, roll_out
from tasks.generate.scheduler import Counters, Scheduler, StopRules
from tasks.policy import Policy, read_policy
from tasks.prompt_files import DataError
from tasks.prompts import Draws, PromptSet, warm_prompts
from tasks.report.decks import generate_deck
from tasks.report.progress import say, stage_progress
from tasks.report.timeline import Timeline
from tasks.resume import check_carry, fingerprints
from tasks.rewards.scoring import Scorer
from tasks.trajectory import ScoreStatus, Status, Trajectory
from tasks.watchdog import watchdog


class Rollouts(NamedTuple):
    """`rows`: all trajectories as they stood at the cut, which `reason` explains."""

    rows: list[Trajectory]
    reason: str
    timeline: Timeline
    metrics: dict[str, float]


def generate_rollouts(
    config: RunConfig, iteration: int, policy_directory: str, carry_directory: str, directory: str
) -> tuple[dict[str, float], str | None]:
    """Sample under the policy until a stop rule fires; writes all trajectories to `directory`.

    Returns the metrics and the stage's pictures; None for pictures that an earlier attempt has left. Raises DataError,
    ShardError or EngineError before any sampling, and PreemptedError when the process is asked to end.
    """
    began = time.monotonic()
    tokenizer, prompts = warm_prompts(config.data.train, policy_directory, config)
    carry = read_shards(carry_directory)
    current = fingerprints(config, policy_directory, prompts)
    check_carry(carry_directory, carry.manifest.fingerprints, current)
    policy = read_policy(policy_directory)
    earlier = f"{config.run_directory}/rollouts/{iteration:04d}"
    complete = read_if_from(earlier, Origin.of(iteration, policy, carry.manifest))
    if complete is not None and not complete.manifest.extra["metrics"]["generate/failed_scores"]:
        say(f"generate: {earlier} is complete already, from an earlier attempt at iteration {iteration}")
        return _taken_over(complete, directory), None
    loading_began = time.monotonic()
    engine = warm_engine(config, policy_directory)
    engine_seconds = time.monotonic() - loading_began
    rollouts = sample_iteration(config, iteration, policy, engine, tokenizer, prompts, carry, current, directory)
    metrics = rollouts.metrics | {
        "generate/seconds": time.monotonic() - began,
        "generate/engine_seconds": engine_seconds,
    }
    deck = generate_deck(
        rollouts.timeline, rollouts.rows, policy.version, rollouts.reason, tokenizer.decode, rollouts.metrics
    )
    return metrics, deck


def _taken_over(complete: Shards, directory: str) -> dict[str, float]:
    """The metrics of complete rollouts of an earlier attempt, which are put where this attempt's belong."""
    manifest = complete.manifest
    if os.path.abspath(complete.directory) != os.path.abspath(directory):
        write_shards(
            complete, directory, cursor=manifest.cursor, fingerprints=manifest.fingerprints, extra=manifest.extra
        )
    return manifest.extra["metrics"]


def sample_iteration(
    config: RunConfig,
    iteration: int,
    policy: Policy,
    engine: Engine,
    tokenizer: Any,
    prompts: Sequence[PromptSet],
    carry: Shards,
    current_fingerprints: dict[str, str],
    directory: str,
) -> Rollouts:
    """`generate_rollouts` with an engine that holds the policy, and everything read and checked."""
    partial_rollout, carried = config.partial_rollout, list(carry)
    if carried and not partial_rollout.enabled:
        raise DataError(
            f"{carry.directory}: holds {len(carried)} trajectories of older weights, which a run with "
            "partial_rollout.enabled: false would mix with new ones; set it to true, or start without resume"
        )
    origin = Origin.of(iteration, policy, carry.manifest)
    flush_directory = f"{config.run_directory}/flush/{iteration:04d}"
    rows, cursor, counted = carried, carry.manifest.cursor, Counters()
    for earlier in (f"{config.run_directory}/rollouts/{iteration:04d}", flush_directory):
        if (saved := read_if_from(earlier, origin)) is not None:
            rows, cursor = continued(saved), saved.manifest.cursor
            counted = Counters(**saved.manifest.extra["counted"])
            say(f"generate: going on from {earlier}, {counted.sampled_tokens:,} tokens into iteration {iteration}")
            break
    draws = Draws(
        prompts, cursor=cursor, seed=config.seed, shuffle=config.data.shuffle, group_size=config.train.group_size
    )
    scheduler = Scheduler(
        rows,
        partial(draws.draw, iteration),
        rules=StopRules(
            ready_groups=config.ready_groups,
            max_tokens=partial_rollout.max_tokens,
            max_seconds=partial_rollout.max_seconds,
            max_engine_steps=partial_rollout.max_engine_steps,
            max_scored_groups=partial_rollout.max_scored_batches * config.train.batch_groups,
        ),
        max_in_flight=partial_rollout.max_in_flight,
        max_response_tokens=config.sampling.max_response_tokens,
        version=policy.version,
        iteration=iteration,
        wait_for_all=not partial_rollout.enabled,
        counted=counted,
    )
    extra_info = {prompt.prompt_id: prompt.extra_info for each in prompts for prompt in each.prompts}
    sampler = Sampler(config.sampling, config.seed, tokenizer, extra_info)
    timeline = Timeline()
    flusher = Flusher(
        flush_directory, partial_rollout.flush_seconds, origin, lambda: draws.cursor, current_fingerprints
    )
    with (
        Scorer(config.reward, config.sampling.max_response_tokens) as scorer,
        flusher,
        watchdog("generate", config.stall_seconds) as beat,
        stage_progress("generate", config.ready_groups) as update,
    ):
        seen = (0, 0)

        def progress(now: Scheduler, seconds: float) -> None:
            nonlocal seen
            if seen != (seen := (now.counted.sampled_tokens, now.scored)):
                beat()
            flusher.update(now, seconds)
            rate = now.counted.sampled_tokens / max(seconds, 1e-9)
            update(
                now.informative_groups,
                f"{now.informative_groups} groups ready, {now.in_flight} in flight, {rate:,.0f} tokens/s",
            )

        rows, reason = roll_out(engine, scheduler, scorer, sampler, timeline=timeline, progress=progress)
    drawn_groups = draws.cursor - carry.manifest.cursor
    measured = {
        "generate/sampling_seconds": counted.seconds,
        "generate/tokens": counted.sampled_tokens,
        "generate/tokens_per_second": counted.sampled_tokens / max(counted.seconds, 1e-9),
        "generate/reprefilled_tokens": counted.reprefilled_tokens,
        "generate/engine_steps": counted.engine_steps,
        "generate/drawn_groups": drawn_groups,
        "generate/dropped_prompts": sum(each.too_long + each.duplicates for each in prompts),
        "generate/cut_trajectories": sum(row.status == Status.PARTIAL for row in rows),
        "generate/resumed_trajectories": sum(row.status == Status.PARTIAL for row in carried),
        "generate/unscored_trajectories": sum(row.status == Status.FINISHED for row in rows),
        "generate/failed_scores": sum(row.status == Status.FAILED for row in rows),
        "generate/unparsed_scores": sum(row.score_status == ScoreStatus.UNPARSED for row in rows),
        "generate/engine_seconds": 0.0,
        "generate/seconds": counted.seconds,
        **{f"reward/{name}": sum(values) / len(values) for name, values in scorer.parts.items()},
    }
    metrics = {name: float(value) for name, value in measured.items()}
    write_shards(
        rows,
        directory,
        cursor=draws.cursor,
        fingerprints=current_fingerprints,
        extra={
            "origin": asdict(origin),
            "iteration": iteration,
            "version": policy.version,
            "stop_reason": reason,
            "generated_tokens": counted.sampled_tokens,
            "drawn_groups": drawn_groups,
            "score_errors": scorer.examples[:5],
            "quarantined": [vars(row) for row in carry.quarantined],
            "carried": carry.manifest.extra,
            "counted": asdict(counted),
            "metrics": metrics,
        },
    )
    return Rollouts(rows, reason, timeline, metrics)

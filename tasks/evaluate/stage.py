"""A whole evaluation: every held-out prompt answered `samples_per_prompt` times, each answer to its end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tasks.config import RunConfig
from tasks.evaluate.metrics import Answer, accuracy_metrics, over_sets
from tasks.generate.engine import warm_engine
from tasks.generate.rollout import Sampler, roll_out
from tasks.generate.scheduler import Scheduler, StopRules
from tasks.policy import read_policy
from tasks.prompts import Draws, PromptSet, warm_prompts
from tasks.report.progress import stage_progress
from tasks.rewards.scoring import Scorer
from tasks.trajectory import Trajectory, group_by_id
from tasks.watchdog import watchdog

ANSWER_SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("sample", pa.int32()),
        ("data_source", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("answer", pa.string()),  # what the scorer read from the response
        ("ground_truth", pa.string()),
        ("accuracy", pa.float32()),
        ("score_status", pa.string()),
        ("finish_reason", pa.string()),
        ("tokens", pa.int32()),
    ]
)


class Evaluation(NamedTuple):
    """`answers`: of each set by its label, a row of ANSWER_SCHEMA for each answer."""

    metrics: dict[str, float]
    answers: dict[str, pa.Table]


def evaluate_policy(config: RunConfig, policy_directory: str) -> Evaluation:
    """The policy on the sets of `data.heldout`; seeded, so that the same policy gives the same answers."""
    began = time.monotonic()
    tokenizer, sets = warm_prompts(config.data.heldout, policy_directory, config)
    rows, answers = _answers(config, policy_directory, tokenizer, sets)
    of_prompt = {prompt.prompt_id: each.source.label for each in sets for prompt in each.prompts}
    by_set = {each.source.label: [] for each in sets}
    for row in rows:
        by_set[of_prompt[row.prompt_id]].append(row)
    measured = [answer_metrics(part, answers, config.evaluate.ks) for part in by_set.values()]
    metrics = {f"evaluate/{name}": value for name, value in over_sets(measured).items()}
    if len(sets) > 1:
        for label, part in zip(by_set, measured, strict=True):
            metrics |= {f"evaluate/{label}/{name}": value for name, value in part.items()}
    tables = {label: _table(part, answers, tokenizer) for label, part in by_set.items()}
    return Evaluation({"evaluate/seconds": time.monotonic() - began, **metrics}, tables)


def _answers(
    config: RunConfig, policy_directory: str, tokenizer: Any, sets: Sequence[PromptSet]
) -> tuple[list[Trajectory], Mapping[tuple[str, int], str | None]]:
    """Every answer, scored, and what was read from each."""
    sampling = config.evaluate.sampling or config.sampling
    policy = read_policy(policy_directory)
    seed = config.seed if config.evaluate.seed is None else config.evaluate.seed
    prompts = [prompt for each in sets for prompt in each.prompts]
    draws = Draws(sets, cursor=0, seed=seed, shuffle=False, group_size=config.evaluate.samples_per_prompt)
    scheduler = Scheduler(
        [row for _ in prompts for row in draws.draw(iteration=0)],
        lambda: [],
        rules=StopRules(ready_groups=0),
        max_in_flight=config.partial_rollout.max_in_flight,
        max_response_tokens=sampling.max_response_tokens,
        version=policy.version,
        iteration=0,
        wait_for_all=True,
    )
    sampler = Sampler(sampling, seed, tokenizer, {prompt.prompt_id: prompt.extra_info for prompt in prompts})
    engine = warm_engine(config, policy_directory)
    with (
        Scorer(config.reward, sampling.max_response_tokens) as scorer,
        watchdog("evaluate", config.stall_seconds) as beat,
        stage_progress("evaluate", len(prompts)) as update,
    ):
        seen = (0, 0)

        def progress(now: Scheduler, _seconds: float) -> None:
            nonlocal seen
            if seen != (seen := (now.counted.sampled_tokens, now.scored)):
                beat()
            update(now.scored_groups, f"{now.scored_groups} of {len(prompts)} prompts answered")

        rows, _ = roll_out(engine, scheduler, scorer, sampler, progress=progress)
    return rows, scorer.answers


def answer_metrics(
    rows: Sequence[Trajectory], answers: Mapping[tuple[str, int], str | None], ks: Sequence[int]
) -> dict[str, float]:
    """Metrics of one set's answers; those whose score failed are left out and counted."""
    scored = [row for row in rows if row.accuracy is not None]
    prompts = [
        [Answer(row.accuracy, answers.get(row.key)) for row in members] for members in group_by_id(scored).values()
    ]
    return accuracy_metrics(prompts, ks) | {
        "response_tokens": float(np.mean([row.tokens for row in rows])),
        "truncated_share": float(np.mean([row.truncated for row in rows])),
        "failed_scores": float(len(rows) - len(scored)),
    }


def _table(rows: Sequence[Trajectory], answers: Mapping[tuple[str, int], str | None], tokenizer: Any) -> pa.Table:
    columns = {name: [getattr(row, name, None) for row in rows] for name in ANSWER_SCHEMA.names}
    columns |= {
        "sample": [row.member for row in rows],
        "prompt": [tokenizer.decode(row.prompt_tokens.tolist()) for row in rows],
        "response": [tokenizer.decode(row.response_tokens.tolist(), skip_special_tokens=True) for row in rows],
        "answer": [answers.get(row.key) for row in rows],
    }
    return pa.table(columns, schema=ANSWER_SCHEMA)

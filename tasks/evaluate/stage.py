"""Held-out accuracy of a policy: every prompt answered `samples_per_prompt` times, each answer to its end."""

from __future__ import annotations

import math
import time

import numpy as np

from tasks.config import RunConfig
from tasks.generate.engine import warm_engine
from tasks.generate.rollout import Sampler, roll_out
from tasks.generate.scheduler import Scheduler, StopRules
from tasks.policy import read_policy
from tasks.prompts import Draws, warm_prompts
from tasks.report.progress import stage_progress
from tasks.rewards.scoring import Scorer
from tasks.trajectory import Trajectory, group_by_id
from tasks.watchdog import watchdog


def evaluate_policy(config: RunConfig, policy_directory: str) -> dict[str, float]:
    """Metrics of the policy on `data.heldout`; seeded, so that the same policy gets the same answers."""
    began = time.monotonic()
    sampling = config.evaluate.sampling or config.sampling
    policy = read_policy(policy_directory)
    tokenizer, prompts = warm_prompts(config.data.heldout, policy_directory, config)
    samples = config.evaluate.samples_per_prompt
    draws = Draws(prompts, cursor=0, seed=config.seed, shuffle=False, group_size=samples)
    rows = [row for _ in prompts.prompts for row in draws.draw(iteration=0)]
    scheduler = Scheduler(
        rows,
        lambda: [],
        rules=StopRules(ready_groups=0),
        max_in_flight=config.partial_rollout.max_in_flight,
        max_response_tokens=sampling.max_response_tokens,
        version=policy.version,
        iteration=0,
        wait_for_all=True,
    )
    extra_info = {prompt.prompt_id: prompt.extra_info for prompt in prompts.prompts}
    sampler = Sampler(sampling, config.seed, tokenizer, extra_info)
    engine = warm_engine(config, policy_directory)
    with (
        Scorer(config.reward, sampling.max_response_tokens) as scorer,
        watchdog("evaluate", config.stall_seconds) as beat,
        stage_progress("evaluate", len(prompts.prompts)) as update,
    ):
        seen = (0, 0)

        def progress(now: Scheduler, _seconds: float) -> None:
            nonlocal seen
            if seen != (seen := (now.counted.sampled_tokens, now.scored)):
                beat()
            update(now.scored_groups, f"{now.scored_groups} of {len(prompts.prompts)} prompts answered")

        rows, _ = roll_out(engine, scheduler, scorer, sampler, progress=progress)
    return {"evaluate/seconds": time.monotonic() - began, **accuracy_metrics(rows)}


def accuracy_metrics(rows: list[Trajectory]) -> dict[str, float]:
    """avg@k: the mean over prompts of the mean accuracy of their answers, with its standard error over prompts."""
    scored = [row for row in rows if row.accuracy is not None]
    per_prompt = [np.mean([row.accuracy for row in members]) for members in group_by_id(scored).values()]
    return {
        "evaluate/accuracy": float(np.mean(per_prompt)) if per_prompt else math.nan,
        "evaluate/accuracy_standard_error": float(np.std(per_prompt, ddof=1) / math.sqrt(len(per_prompt)))
        if len(per_prompt) > 1
        else math.nan,
        "evaluate/response_tokens": float(np.mean([row.tokens for row in rows])),
        "evaluate/truncated_share": float(np.mean([row.truncated for row in rows])),
        "evaluate/failed_scores": float(len(rows) - len(scored)),
    }

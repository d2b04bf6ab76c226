"""The loop of a generate stage: engine, scheduler and scorers, until a stop rule cuts it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tasks.config import SamplingConfig
from tasks.generate.engine import Engine, EngineError, Request
from tasks.generate.scheduler import Scheduler
from tasks.report.timeline import Timeline
from tasks.rewards.scoring import Scorer
from tasks.trajectory import Trajectory


@dataclass(frozen=True)
class Sampler:
    """How a trajectory becomes an engine request and, once ended, a text to score."""

    sampling: SamplingConfig
    seed: int
    tokenizer: Any
    extra_info: Mapping[str, Mapping[str, Any]]  # by prompt_id

    def request(self, row: Trajectory) -> Request:
        """Prompt and kept tokens go back as ids, never re-tokenised, with the budget that remains."""
        return Request(
            request_id=request_id(row),
            tokens=np.concatenate([row.prompt_tokens, row.response_tokens]),
            max_tokens=self.sampling.max_response_tokens - row.tokens,
            seed=self._seed(row) if self.sampling.seed_requests else None,
        )

    def _seed(self, row: Trajectory) -> int:
        origin = (self.seed, row.group_id, row.member, row.attempt, row.tokens)
        return int.from_bytes(hashlib.sha256(repr(origin).encode()).digest()[:7], "big")

    def submit(self, row: Trajectory, scorer: Scorer) -> None:
        text = self.tokenizer.decode(row.response_tokens.tolist(), skip_special_tokens=True)
        scorer.submit(row, text, self.extra_info.get(row.prompt_id, {}))


def request_id(row: Trajectory) -> str:
    return f"{row.group_id}/{row.member}/{row.attempt}"


def roll_out(
    engine: Engine,
    scheduler: Scheduler,
    scorer: Scorer,
    sampler: Sampler,
    *,
    timeline: Timeline | None = None,
    progress: Callable[[Scheduler, float], None] = lambda *_: None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Trajectory], str]:
    """Sample until a stop rule fires; returns every trajectory as it stands, and the rule that fired.

    Scores that are ready at the cut count; the others are not waited for, and their trajectories stay `finished`.
    `timeline` is told of every trajectory that enters or leaves the engine.
    Raises EngineError if the engine holds other weights than the scheduler labels tokens with, or cannot let go.
    """
    if engine.version != scheduler.version:
        raise EngineError(f"the engine holds version {engine.version}, the stage samples version {scheduler.version}")
    timeline = timeline or Timeline()
    keys = {}
    start = clock() - scheduler.counted.seconds
    while (reason := scheduler.stop_reason(clock() - start)) is None:
        for row in scheduler.admit():
            keys[request_id(row)] = row.key
            engine.admit(sampler.request(row), sampler.sampling)
            timeline.enter(row, clock() - start)
        if scheduler.in_flight:
            for delta in engine.step():
                key = keys[delta.request_id]
                ended = scheduler.receive(key, delta.tokens, delta.logprobs, delta.finish_reason)
                if ended is not None:
                    timeline.leave(ended, clock() - start)
            scheduler.counted.engine_steps += 1
        for row in scheduler.take_unscored():
            sampler.submit(row, scorer)
        for row in scorer.ready(wait_seconds=0.0 if scheduler.in_flight else 1.0):
            scheduler.score(row)
        progress(scheduler, clock() - start)
    engine.abort_all()
    seconds = scheduler.counted.seconds = clock() - start
    for row in scorer.ready():
        scheduler.score(row)
    rows = scheduler.cut()
    for row in rows:
        timeline.leave(row, seconds)
    return rows, reason

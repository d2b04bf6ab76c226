"""Score ended trajectories while others are still decoding, each under a hard time limit.

Scorers (`scorers.py`) run in worker processes that are killed when they overrun, and that cannot take more than their
share of memory; a score that raises, times out or is no number in [0, 1] becomes a `score_status`, never a 0.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import multiprocessing
import resource
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, TimeoutError, wait
from typing import Any

from pebble import ProcessPool

from tasks.config import RewardConfig
from tasks.rewards.overlong import soft_overlong_penalty
from tasks.rewards.scorers import Response, Score, ScoreError, prefers_many, score
from tasks.trajectory import ScoreStatus, Status, Trajectory

Job = list[tuple[Trajectory, Response]]


@functools.cache
def warm_pool(workers: int, memory_gib: float) -> ProcessPool:
    """The scorer processes of this process: started once, replaced one by one when they are killed."""
    pool = ProcessPool(
        max_workers=workers,
        context=multiprocessing.get_context("spawn"),
        initializer=limit_memory,
        initargs=(memory_gib,),
    )
    atexit.register(pool.stop)
    return pool


def limit_memory(gib: float) -> None:
    """From now on this process gets a MemoryError instead of more than so much memory."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30), hard))


class Scorer:
    """Scores trajectories; use as a context manager. With `reward.workers: 0` each is scored when it is submitted.

    `answers`: what was read from each response scored so far, by (group, member); `parts`: the parts of their rewards,
    by name; `examples`: failures, in words.
    """

    def __init__(self, reward: RewardConfig, max_response_tokens: int) -> None:
        self._reward = reward
        self._max_response_tokens = max_response_tokens
        self._scored: list[Trajectory] = []
        self._waiting: dict[str, Job] = defaultdict(list)  # by data source, to be scored several at once
        self._running: dict[Future, Job] = {}
        self._pool = warm_pool(reward.workers, reward.worker_memory_gib) if reward.workers else None
        self.answers: dict[tuple[str, int], str | None] = {}
        self.parts: dict[str, list[float]] = defaultdict(list)
        self.examples: list[str] = []

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        for future in self._running:
            future.cancel()  # ends its worker, if it is being scored

    def submit(self, row: Trajectory, text: str, extra_info: Mapping[str, Any]) -> None:
        """Score a finished trajectory whose response reads `text`."""
        if row.truncated and not self._reward.score_truncated:
            self._take(row, Score(0.0))
            return
        job = [(row, Response(row.data_source, text, row.ground_truth, extra_info))]
        if self._pool is None:
            self._score_here(job)
        elif prefers_many(self._reward, row.data_source):
            self._waiting[row.data_source] += job
        else:
            self._start(job)

    def ready(self, wait_seconds: float | None = 0.0) -> list[Trajectory]:
        """Trajectories scored since the last call; waits up to `wait_seconds` (None: as long as it takes) for one."""
        for job in self._waiting.values():
            self._start(job)
        self._waiting.clear()
        if self._running and not self._scored and wait_seconds != 0:
            wait(self._running, timeout=wait_seconds, return_when=FIRST_COMPLETED)
        for future in [future for future in self._running if future.done()]:
            self._end(future, self._running.pop(future))
        scored, self._scored = self._scored, []
        return scored

    def _start(self, job: Job) -> None:
        responses = [response for _, response in job]
        future = self._pool.schedule(score, args=(self._reward, responses), timeout=self._reward.timeout_seconds)
        self._running[future] = job

    def _end(self, future: Future, job: Job) -> None:
        try:
            scores = future.result()
        except Exception as error:
            if len(job) > 1:  # one of them is to blame, which is found by scoring each alone
                for single in job:
                    self._start([single])
            elif isinstance(error, TimeoutError):
                self._fail(job[0][0], ScoreStatus.TIMEOUT, f"no score within {self._reward.timeout_seconds} s")
            else:
                self._fail(job[0][0], ScoreStatus.ERROR, _in_words(error))
        else:
            self._take_all(job, scores)

    def _score_here(self, job: Job) -> None:
        try:
            scores = score(self._reward, [response for _, response in job])
        except Exception as error:
            self._fail(job[0][0], ScoreStatus.ERROR, _in_words(error))
        else:
            self._take_all(job, scores)

    def _take_all(self, job: Job, scores: Sequence[Score]) -> None:
        for (row, _), scored in zip(job, scores, strict=True):
            self._take(row, scored)

    def _take(self, row: Trajectory, scored: Score) -> None:
        reward = self._reward
        value = reward.wrong + scored.accuracy * (reward.correct - reward.wrong) + scored.bonus
        if reward.overlong_cache:
            value += soft_overlong_penalty(row.tokens, self._max_response_tokens, reward.overlong_cache)
        self.answers[row.key] = scored.answer
        for name, part in (scored.parts or {}).items():
            self.parts[name].append(part)
        self._scored.append(
            dataclasses.replace(
                row,
                status=Status.SCORED,
                accuracy=scored.accuracy,
                reward=value,
                score_status=ScoreStatus.OK if scored.parsed else ScoreStatus.UNPARSED,
            )
        )

    def _fail(self, row: Trajectory, status: ScoreStatus, why: str) -> None:
        self.examples.append(f"{row.group_id} member {row.member}: {status}: {why}")
        self._scored.append(dataclasses.replace(row, status=Status.FAILED, score_status=status))


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, ScoreError) else repr(error)

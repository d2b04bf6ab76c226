"""Score ended trajectories while others are still decoding, each under a hard time limit.

A scorer is any function with verl's signature `(data_source, solution_str, ground_truth, extra_info) -> float`. It runs
in worker processes that are killed when they overrun; a score that raises, times out or is no number in [0, 1] becomes
a `score_status`, never a 0.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import importlib
import math
import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, TimeoutError, wait
from typing import Any

from pebble import ProcessPool

from tasks.config import ConfigError, RewardConfig
from tasks.rewards.overlong import soft_overlong_penalty
from tasks.trajectory import ScoreStatus, Status, Trajectory

ScoreFunction = Callable[[str, str, str, Mapping[str, Any]], float]


def load_function(path: str) -> ScoreFunction:
    """The function named `package.module:function`. Raises ConfigError naming `reward.function`."""
    module_name, _, function_name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"reward.function = {path!r} cannot be imported as package.module:function: {error}"
        ) from None
    if not callable(function):
        raise ConfigError(f"reward.function = {path!r} is not a function")
    return function


def call_scorer(path: str, arguments: tuple[str, str, str, Mapping[str, Any]]) -> Any:
    """What a worker process runs."""
    return load_function(path)(*arguments)


@functools.cache
def warm_pool(workers: int) -> ProcessPool:
    """The scorer processes of this process: started once, replaced one by one when they are killed."""
    pool = ProcessPool(max_workers=workers, context=multiprocessing.get_context("spawn"))
    atexit.register(pool.stop)
    return pool


class Scorer:
    """Scores trajectories; use as a context manager. With `reward.workers: 0` each is scored when it is submitted."""

    def __init__(self, reward: RewardConfig, max_response_tokens: int) -> None:
        self._reward = reward
        self._max_response_tokens = max_response_tokens
        self._function = load_function(reward.function)
        self._scored: list[Trajectory] = []
        self._running: dict[Future, Trajectory] = {}
        self.examples: list[str] = []
        self._pool = warm_pool(reward.workers) if reward.workers else None

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        for future in self._running:
            future.cancel()  # ends its worker, if it is being scored

    def submit(self, row: Trajectory, text: str, extra_info: Mapping[str, Any]) -> None:
        """Score a finished trajectory whose response reads `text`."""
        if row.truncated and not self._reward.score_truncated:
            self._scored.append(self._with_score(row, 0.0))
            return
        arguments = (row.data_source, text, row.ground_truth, extra_info)
        if self._pool is not None:
            future = self._pool.schedule(
                call_scorer, args=(self._reward.function, arguments), timeout=self._reward.timeout_seconds
            )
            self._running[future] = row
            return
        try:
            value = self._function(*arguments)
        except Exception as error:
            self._fail(row, ScoreStatus.ERROR, repr(error))
        else:
            self._take(row, value)

    def ready(self, wait_seconds: float | None = 0.0) -> list[Trajectory]:
        """Trajectories scored since the last call; waits up to `wait_seconds` (None: as long as it takes) for one."""
        if self._running and not self._scored and wait_seconds != 0:
            wait(self._running, timeout=wait_seconds, return_when=FIRST_COMPLETED)
        for future in [future for future in self._running if future.done()]:
            row = self._running.pop(future)
            try:
                value = future.result()
            except TimeoutError:
                self._fail(row, ScoreStatus.TIMEOUT, f"no score within {self._reward.timeout_seconds} s")
            except Exception as error:
                self._fail(row, ScoreStatus.ERROR, repr(error))
            else:
                self._take(row, value)
        scored, self._scored = self._scored, []
        return scored

    def _take(self, row: Trajectory, value: Any) -> None:
        try:
            accuracy = float(value)
        except (TypeError, ValueError):
            accuracy = math.nan
        if 0.0 <= accuracy <= 1.0:
            self._scored.append(self._with_score(row, accuracy))
        else:
            self._fail(row, ScoreStatus.ERROR, f"the scorer returned {value!r}, not a number in [0, 1]")

    def _with_score(self, row: Trajectory, accuracy: float) -> Trajectory:
        reward = self._reward
        value = reward.wrong + accuracy * (reward.correct - reward.wrong)
        if reward.overlong_cache:
            value += soft_overlong_penalty(row.tokens, self._max_response_tokens, reward.overlong_cache)
        return dataclasses.replace(
            row, status=Status.SCORED, accuracy=accuracy, reward=value, score_status=ScoreStatus.OK
        )

    def _fail(self, row: Trajectory, status: ScoreStatus, why: str) -> None:
        self.examples.append(f"{row.group_id} member {row.member}: {status}: {why}")
        self._scored.append(dataclasses.replace(row, status=Status.FAILED, score_status=status))

"""Scores: hard time limits, and a failure is a status, never a 0."""

import math
import time

import pytest

from tasks.config import ConfigError, RewardConfig
from tasks.rewards.overlong import soft_overlong_penalty
from tasks.rewards.scoring import Scorer, load_function
from tasks.trajectory import FinishReason, ScoreStatus, Status, Trajectory, extend


def scripted(data_source, solution_str, ground_truth, extra_info):
    """Does what the response says."""
    if solution_str == "raise":
        raise ValueError("bad LaTeX")
    if solution_str == "hang":
        return 10 ** (10**10)  # inside C code, deaf to signals
    if solution_str == "extra":
        return extra_info["value"]
    return {"nan": math.nan, "text": "x", "two": 2.0, "none": None}.get(
        solution_str, float(solution_str == ground_truth)
    )


def ended(member=0, tokens=3, reason=FinishReason.STOP):
    row = Trajectory("g", member, "g", "test", "right", [1], 0)
    return extend(row, list(range(tokens)), [-0.5] * tokens, 0, reason, iteration=0)


def score(texts, workers=0, timeout=2.0, **settings):
    reward = RewardConfig(
        function="test_scoring:scripted", workers=workers, timeout_seconds=timeout, **{"overlong_cache": 0, **settings}
    )
    with Scorer(reward, 100) as scorer:
        for member, text in enumerate(texts):
            scorer.submit(ended(member), text, {"value": 0.25})
        rows = []
        while len(rows) < len(texts):
            rows += scorer.ready(wait_seconds=5.0)
    return sorted(rows, key=lambda row: row.member)


@pytest.mark.parametrize("workers", [0, 2])
def test_accuracy_and_reward(workers):
    rows = score(["right", "wrong", "extra"], workers)
    assert [(row.accuracy, row.reward) for row in rows] == [(1.0, 1.0), (0.0, -1.0), (0.25, -0.5)]
    assert {row.status for row in rows} == {Status.SCORED}


@pytest.mark.parametrize("workers", [0, 2])
def test_scorer_failures_are_statuses_not_zeros(workers):
    rows = score(["raise", "nan", "text", "two", "none", "right"], workers)
    assert [row.score_status for row in rows] == [ScoreStatus.ERROR] * 5 + [ScoreStatus.OK]
    assert {row.status for row in rows[:5]} == {Status.FAILED}
    assert {row.accuracy for row in rows[:5]} == {None}


def test_hanging_scorer_is_killed_and_others_go_on():
    began = time.monotonic()
    rows = score(["hang", "right", "hang", "wrong"], workers=2, timeout=1.0)
    assert [row.score_status for row in rows] == [
        ScoreStatus.TIMEOUT,
        ScoreStatus.OK,
        ScoreStatus.TIMEOUT,
        ScoreStatus.OK,
    ]
    assert time.monotonic() - began < 60  # far less than the scorer would take


def test_truncated_answer_earns_nothing_unless_asked():
    for asked, accuracy in ((False, 0.0), (True, 1.0)):
        reward = RewardConfig(function="test_scoring:scripted", workers=0, overlong_cache=0, score_truncated=asked)
        with Scorer(reward, 100) as scorer:
            scorer.submit(ended(tokens=100, reason=FinishReason.LENGTH), "right", {})
            assert scorer.ready()[0].accuracy == accuracy


def test_overlong_shaping_changes_the_reward_and_not_the_accuracy():
    reward = RewardConfig(function="test_scoring:scripted", workers=0, overlong_cache=20)
    with Scorer(reward, 100) as scorer:
        scorer.submit(ended(tokens=90), "wrong", {})
        row = scorer.ready()[0]
    assert (row.accuracy, row.reward) == (0.0, -1.5)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (16384, 0.0), (17000, -0.150390625), (18000, -0.39453125), (20480, -1.0), (30000, -1.0)],
)
def test_soft_overlong_penalty(length, penalty):
    assert soft_overlong_penalty(length, 20480, 4096) == penalty


@pytest.mark.parametrize(
    "path", ["nothing", "no.such.module:f", "tasks.rewards.scoring:absent", "tasks.config:__name__"]
)
def test_reward_function_that_cannot_be_imported_is_refused(path):
    with pytest.raises(ConfigError, match=r"reward\.function"):
        load_function(path)

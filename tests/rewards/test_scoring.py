"""Scores: hard time limits, and a failure is a status, never a 0."""

import asyncio
import math
import time

import pytest

from tasks.config import ConfigError, RewardConfig
from tasks.rewards import exact_match, formats, gsm8k
from tasks.rewards.overlong import soft_overlong_penalty
from tasks.rewards.scorers import check_scorers, load_scorer
from tasks.rewards.scoring import Scorer
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
        load_scorer(path)


def as_dict(data_source, solution_str, ground_truth, extra_info):
    return {"score": -1.0, "acc": solution_str == ground_truth, "pred": solution_str or None, "steps": 3, "note": "x"}


def many(data_sources, solution_strs, ground_truths, extra_infos):
    """One call for several responses; one bad response spoils its whole call."""
    if "raise" in solution_strs:
        raise ValueError("cannot")
    return [float(text == truth) for text, truth in zip(solution_strs, ground_truths, strict=True)]


async def judged(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.3)
    return float(solution_str == ground_truth)


def length(solution_str, **_):
    return float(len(solution_str))


def wrong_signature(response, answer):
    return 1.0


def by(function, texts, workers=0, **settings):
    reward = RewardConfig(function=f"test_scoring:{function}", workers=workers, overlong_cache=0, **settings)
    with Scorer(reward, 100) as scorer:
        for member, text in enumerate(texts):
            scorer.submit(ended(member), text, {})
        rows = []
        while len(rows) < len(texts):
            rows += scorer.ready(wait_seconds=5.0)
    return sorted(rows, key=lambda row: row.member), scorer


def test_a_dict_gives_accuracy_answer_and_parts_and_no_answer_is_unparsed():
    rows, scorer = by("as_dict", ["right", "wrong", ""])
    assert [row.accuracy for row in rows] == [1.0, 0.0, 0.0]
    assert [row.score_status for row in rows] == [ScoreStatus.OK, ScoreStatus.OK, ScoreStatus.UNPARSED]
    assert list(scorer.answers.values()) == ["right", "wrong", None]
    assert scorer.parts == {"steps": [3.0, 3.0, 3.0]}


@pytest.mark.parametrize("workers", [0, 2])
def test_several_at_once_or_async_and_one_bad_response_fails_alone(workers):
    rows, _ = by("many", ["right", "raise", "wrong", "right"], workers)
    assert [row.accuracy for row in rows] == [1.0, None, 0.0, 1.0]
    assert rows[1].score_status == ScoreStatus.ERROR
    rows, _ = by("judged", ["right", "wrong", "right"], workers)
    assert [row.accuracy for row in rows] == [1.0, 0.0, 1.0]


def test_terms_shape_the_reward_and_not_the_accuracy():
    terms = [{"function": "test_scoring:length", "weight": 0.1}, {"function": "test_scoring:as_dict", "weight": 2.0}]
    rows, scorer = by("many", ["right", "wrong!"], terms=terms)
    assert [row.accuracy for row in rows] == [1.0, 0.0]
    assert [row.reward for row in rows] == pytest.approx([1.0 + 0.5 + 2.0, -1.0 + 0.6 + 0.0])
    assert scorer.parts["length"] == [5.0, 6.0]


def test_each_data_source_may_have_a_scorer_of_its_own():
    rows, _ = by("many", ["right"], by_data_source={"test": "test_scoring:as_dict", "other": "test_scoring:many"})
    assert rows[0].accuracy == 1.0
    rows, scorer = by("length", ["right"], by_data_source={"test": "test_scoring:as_dict"})
    assert scorer.answers == {("g", 0): "right"}


def test_a_scorer_may_stand_in_a_file_of_its_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.75\n")
    assert load_scorer(f"{path}:compute_score")("", "", "") == 0.75
    with pytest.raises(ConfigError, match=r"reward.function = .*absent.py:f"):
        load_scorer(f"{tmp_path}/absent.py:f")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": "test_scoring:wrong_signature"}, r"reward.function = .*cannot be called with data_source"),
        (
            {"function": "test_scoring:many", "terms": [{"function": "absent:f"}]},
            r"reward.terms\[0\].function = 'absent:f'",
        ),
        (
            {"function": "test_scoring:many", "by_data_source": {"a": "absent:f"}},
            r"reward.by_data_source\['a'\] = 'absent",
        ),
    ],
)
def test_scorers_that_cannot_work_are_refused_by_their_setting(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_scorers(RewardConfig(**settings))


def test_a_scorer_gets_no_more_memory_than_its_share():
    rows, _ = by("hungry", ["a"], workers=1, worker_memory_gib=1.0)
    assert rows[0].score_status == ScoreStatus.ERROR


def hungry(data_source, solution_str, ground_truth, extra_info):
    return float(len(bytearray(2 * 2**30)) > 0)


@pytest.mark.parametrize(
    ("scorer", "response", "truth", "accuracy"),
    [
        (gsm8k.compute_score, "so #### 1,234", "some steps\n#### 1234", 1.0),
        (gsm8k.compute_score, "#### 3 no, #### $4.0", "4", 1.0),
        (gsm8k.compute_score, "the answer is 4", "4", 0.0),
        (gsm8k.last_number, "first 3, then 4.", "4", 1.0),
        (exact_match.compute_score, "thinking\nParis \n", "Paris", 1.0),
        (exact_match.compute_score, "Paris, I think", "Paris", 0.0),
    ],
)
def test_shipped_scorers(scorer, response, truth, accuracy):
    assert scorer("test", response, truth)["accuracy"] == accuracy


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>a\nb</think> 5", 1.0),
        ("a</think>\n5", 1.0),
        ("5", 0.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think> b </think> c", 0.0),
    ],
)
def test_format_reward_wants_one_thought_and_an_answer(response, value):
    assert formats.thinks_then_answers("test", response, "5") == value
    assert formats.states_an_answer("test", response + " Answer: 5", "5") == 1.0

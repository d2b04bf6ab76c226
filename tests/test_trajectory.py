"""What a trajectory is, and what it can never be."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.trajectory import (
    SCHEMA,
    FinishReason,
    ScoreStatus,
    Segment,
    Status,
    Trajectory,
    extend,
    from_record_batch,
    group_by_id,
    to_record_batch,
    violations,
)

PENDING = Trajectory("p.0", 1, "p", "test", "4", [1, 2, 3], 5)
PARTIAL = extend(extend(PENDING, [7, 8], [-0.1, -0.2], 3), [9], [-0.3], 5)
FINISHED = extend(PARTIAL, [0], [-0.4], 5, FinishReason.STOP, iteration=6)
SCORED = dataclasses.replace(
    FINISHED, status=Status.SCORED, accuracy=1.0, reward=0.5, score_status=ScoreStatus.OK, resumes=1
)
FAILED = dataclasses.replace(FINISHED, status=Status.FAILED, score_status=ScoreStatus.TIMEOUT)
GOOD = [PENDING, PARTIAL, FINISHED, SCORED, FAILED]


def test_the_columns_are_the_documented_ones():
    assert SCHEMA.names == [
        *("group_id", "member", "attempt", "prompt_id", "data_source", "ground_truth"),
        *("prompt_tokens", "response_tokens", "logprobs", "segments", "status", "finish_reason", "resumes"),
        *("accuracy", "reward", "score_status", "created_iteration", "finished_iteration"),
    ]


def test_good_rows_break_nothing_and_survive_arrow():
    assert [violations(row) for row in GOOD] == [[]] * len(GOOD)
    assert list(from_record_batch(to_record_batch(GOOD))) == GOOD
    assert list(from_record_batch(to_record_batch(GOOD).slice(2, 2))) == GOOD[2:4]
    assert list(from_record_batch(to_record_batch([]))) == []


@pytest.mark.parametrize(
    ("row", "changes", "rule"),
    [
        (PARTIAL, {"logprobs": [-0.1]}, "3 response tokens but 1 log-probs"),
        (PARTIAL, {"segments": (Segment(0, 2, 3),)}, "segments cover 2 of 3"),
        (PARTIAL, {"segments": (Segment(0, 2, 3), Segment(1, 1, 5))}, "not contiguous"),
        (PARTIAL, {"segments": (Segment(1, 2, 3), Segment(3, 1, 5))}, "not contiguous"),
        (PARTIAL, {"segments": (Segment(0, 3, 3), Segment(3, 0, 5))}, "empty or negative"),
        (PARTIAL, {"segments": (Segment(0, 4, 3), Segment(4, -1, 5))}, "empty or negative"),
        (PARTIAL, {"segments": (Segment(0, 2, 5), Segment(2, 1, 3))}, "versions decrease"),
        (PARTIAL, {"status": Status.PENDING}, "pending trajectory has tokens"),
        (PENDING, {"status": Status.PARTIAL}, "partial trajectory has no tokens"),
        (PARTIAL, {"status": "running"}, "status 'running' is none of"),
        (PARTIAL, {"status": Status.FINISHED}, "with finish_reason None"),
        (FINISHED, {"finish_reason": None}, "with finish_reason None"),
        (FINISHED, {"finish_reason": "bored"}, "finish_reason 'bored' is none of"),
        (FINISHED, {"finished_iteration": None}, "with finished_iteration None"),
        (PARTIAL, {"finish_reason": FinishReason.STOP}, "partial with finish_reason stop"),
        (SCORED, {"accuracy": None}, "scored with accuracy None"),
        (SCORED, {"reward": float("nan")}, "reward nan"),
        (SCORED, {"score_status": None}, "without score_status"),
        (SCORED, {"score_status": "fine"}, "score_status 'fine' is none of"),
        (PENDING, {"prompt_tokens": []}, "the prompt is empty"),
        (PENDING, {"member": -1}, "must not be negative"),
        (PENDING, {"attempt": -1}, "must not be negative"),
    ],
)
def test_each_broken_invariant_is_named(row, changes, rule):
    assert any(rule in broken for broken in violations(dataclasses.replace(row, **changes)))


def test_finished_by_reason_and_never_by_length():
    empty = extend(PENDING, [], [], 3, FinishReason.LENGTH, iteration=6)
    assert (empty.status, empty.tokens, empty.segments) == (Status.FINISHED, 0, ())
    assert violations(empty) == []


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=8))
def test_extending_keeps_every_invariant_and_loses_no_token(pieces):
    row, version, expected = PENDING, 0, []
    for length, later in pieces:
        version += later
        tokens = list(range(len(expected), len(expected) + length))
        row = extend(row, tokens, [-float(token) for token in tokens], version)
        expected += [(token, version) for token in tokens]
    assert violations(row) == []
    assert list(zip(row.response_tokens, row.versions(), strict=True)) == expected
    assert np.array_equal(row.logprobs, [-float(token) for token, _ in expected])
    assert (row.oldest_version is None) == (not expected)


def test_extending_is_refused_where_it_makes_no_sense():
    with pytest.raises(ValueError, match="cannot extend a trajectory that is finished"):
        extend(FINISHED, [1], [-0.1], 6)
    with pytest.raises(ValueError, match="2 tokens but 1 log-probs"):
        extend(PENDING, [1, 2], [-0.1], 6)
    with pytest.raises(ValueError, match="needs the iteration"):
        extend(PENDING, [1], [-0.1], 6, FinishReason.STOP)


def test_a_restarted_member_is_pending_as_its_next_attempt():
    again = SCORED.restarted()
    assert (again.status, again.tokens, again.attempt, again.key) == (Status.PENDING, 0, 1, SCORED.key)
    assert violations(again) == []


def test_groups_are_joined_by_id_in_order_of_appearance():
    other = dataclasses.replace(PENDING, group_id="q.0")
    assert list(group_by_id([other, PENDING, other]).items()) == [("q.0", [other, other]), ("p.0", [PENDING])]

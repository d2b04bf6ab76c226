"""Mathematics: what a response states, and whether it is right, on answers of every kind whose verdict is known."""

from collections import Counter
from pathlib import Path

import pytest

from tasks.config import RewardConfig
from tasks.rewards.math import compute_score, last_answer, same_answer
from tasks.rewards.scoring import Scorer
from tasks.trajectory import FinishReason, ScoreStatus, Trajectory, extend

TABLE = [line.split("\t") for line in Path(__file__).with_name("answers.tsv").read_text().splitlines()[1:]]
KINDS = sorted({row[0] for row in TABLE})


def test_the_table_has_300_pairs_with_right_and_wrong_ones_of_every_kind():
    counts = Counter((kind, verdict) for kind, verdict, *_ in TABLE)
    assert len(TABLE) >= 300
    assert all(counts[kind, verdict] >= 6 for kind in KINDS for verdict in ("right", "wrong"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_verdict_of_the_table_is_found(kind):
    for _, verdict, answer, truth in (row for row in TABLE if row[0] == kind):
        response = answer.replace("⏎", "\n") if kind == "whole responses" else f"Then we are done.\nAnswer: {answer}"
        assert compute_score("math", response, truth)["accuracy"] == float(verdict == "right"), (answer, truth)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("nothing is stated", None),
        (r"\boxed{4}, no: \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{4} Answer: 7", "7"),
        ("Answer: 7\n" + r"\boxed{4}", "4"),
        (r"\boxed{2} and \boxed{3", "2"),
        (r"\boxed{}", None),
        ("Answer:\n\n5", None),
        (r"Answer: $\{1,2\}$", r"\{1,2\}"),
    ],
)
def test_the_last_stated_answer_counts(response, answer):
    assert last_answer(response) == answer


def test_an_endless_answer_says_nothing():
    assert not same_answer("1+" * 600 + "1", "601")


def test_a_tower_of_powers_is_killed_and_not_waited_for_and_an_answer_without_a_statement_is_unparsed():
    reward = RewardConfig(
        function="tasks.rewards.math:compute_score",
        workers=2,
        timeout_seconds=20,
        overlong_cache=0,
        worker_memory_gib=2,
    )
    texts = [r"\boxed{10^{10^{10^{10}}}}", r"\boxed{7}", "I do not know", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{14/2}"]
    with Scorer(reward, 100) as scorer:
        for member, text in enumerate(texts):
            row = extend(Trajectory("g", member, "g", "math", "7", [1], 0), [5], [-0.5], 0, FinishReason.STOP, 0)
            scorer.submit(row, text, {})
        rows = []
        while len(rows) < len(texts):
            rows += scorer.ready(wait_seconds=5.0)
    rows.sort(key=lambda row: row.member)
    statuses = [row.score_status for row in rows]
    assert {statuses[0], statuses[3]} <= {ScoreStatus.TIMEOUT, ScoreStatus.ERROR}
    assert [statuses[1], statuses[2], statuses[4]] == [ScoreStatus.OK, ScoreStatus.UNPARSED, ScoreStatus.OK]
    assert [row.accuracy for row in rows] == [None, 1.0, 0.0, None, 1.0]
    assert scorer.answers[("g", 1)] == "7"

"""Evaluation metrics against numbers worked out by hand and against plain enumeration."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tasks.evaluate.metrics import Answer, accuracy_metrics, interval, maj_at_k, over_sets, pass_at_k, standard_error


def answers(text):
    """`"a! b c ."`: words are answers, `!` marks the right one, `.` is a response without an answer."""
    parts = text.split()
    return [Answer(float("!" in part), None if part == "." else part.strip("!")) for part in parts]


@pytest.mark.parametrize(
    ("text", "k", "expected"),
    [
        ("a! b c d", 1, 1 / 4),
        ("a! b c d", 2, 1 - 3 / 6),  # C(3,2) = 3 of C(4,2) = 6 pairs are without it
        ("a! b c d", 4, 1.0),
        ("a! a! b c", 2, 1 - 1 / 6),
        ("a b c d", 4, 0.0),
        ("a! a! a! .", 2, 1.0),
    ],
)
def test_pass_at_k_by_hand(text, k, expected):
    assert pass_at_k(answers(text), k) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "k", "expected"),
    [
        ("a! b b", 3, 0.0),
        ("a! a! b", 3, 1.0),
        ("a! b", 2, 1 / 2),  # a tie
        ("a! b c", 3, 1 / 3),
        ("a! a! b c", 2, (1 + 4 / 2 + 0) / 6),  # pairs: aa right, four with one a tied, bc wrong
        ("2! 2.0! 3 3", 4, 1 / 2),  # right answers are one answer, however written
        ("a! . .", 3, 1.0),  # no vote without an answer
        (". .", 2, 0.0),
        ("a! b b c", 1, 1 / 4),
    ],
)
def test_maj_at_k_by_hand(text, k, expected):
    assert maj_at_k(answers(text), k) == pytest.approx(expected)


@given(rights=st.lists(st.booleans(), min_size=1, max_size=8), k=st.integers(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(rights, k):
    k = min(k, len(rights))
    enumerated = np.mean([any(subset) for subset in itertools.combinations(rights, k)])
    assert pass_at_k([Answer(float(right)) for right in rights], k) == pytest.approx(enumerated)


def test_maj_at_k_of_many_answers_is_near_the_mean_over_all_subsets_and_always_the_same():
    many = answers("a! " * 8 + "b " * 6 + "c " * 4 + ". . . . . .")  # C(24, 12) = 2.7 million subsets
    generator = np.random.default_rng(0)
    drawn = [generator.multivariate_hypergeometric([8, 6, 4, 6], 12) for _ in range(40000)]
    votes = [(counts[0] == max(counts[:3])) / sum(count == max(counts[:3]) for count in counts[:3]) for counts in drawn]
    assert maj_at_k(many, 12) == pytest.approx(np.mean(votes), abs=0.05)
    assert maj_at_k(many, 12) == maj_at_k(many, 12)


def test_intervals_by_hand():
    """Means 1, 0.5, 0 and 0.5: s = √(1/6), error √(1/24), t(0.975, 3) = 3.1824."""
    values = [1.0, 0.5, 0.0, 0.5]
    assert standard_error(values) == pytest.approx(math.sqrt(1 / 24))
    low, high = interval([0.4, 0.5, 0.6, 0.5])
    assert (low, high) == pytest.approx(
        (0.5 - 3.1824 * math.sqrt(0.02 / 3 / 4), 0.5 + 3.1824 * math.sqrt(0.02 / 12)), abs=1e-4
    )
    assert interval(values)[1] == 1.0  # never beyond what an accuracy can be
    assert all(math.isnan(bound) for bound in interval([1.0]))


def test_the_interval_covers_the_true_mean_as_often_as_it_says():
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        low, high = interval(list(generator.binomial(8, 0.4, size=30) / 8))
        covered += low <= 0.4 <= high
    assert stats.binomtest(covered, 2000, 0.95).pvalue > 1e-3


def test_all_metrics_of_a_small_evaluation_by_hand():
    prompts = [answers("a! a! b c"), answers("b b b a!"), answers(". . . ."), []]
    found = accuracy_metrics(prompts, (1, 2, 4))
    assert found["accuracy"] == pytest.approx((0.5 + 0.25 + 0) / 3)
    assert found["pass@1"] == pytest.approx(found["accuracy"])
    assert found["pass@2"] == pytest.approx((5 / 6 + 1 / 2 + 0) / 3)
    assert found["pass@4"] == pytest.approx(2 / 3)
    assert found["maj@1"] == pytest.approx(0.25)
    assert found["maj@2"] == pytest.approx((3 / 6 + (3 * 0.5) / 6 + 0) / 3)
    assert found["maj@4"] == pytest.approx((1 + 0 + 0) / 3)
    assert found["accuracy_low"] == 0.0
    assert found["accuracy_standard_error"] == pytest.approx(np.std([0.5, 0.25, 0], ddof=1) / math.sqrt(3))
    assert not any("maj" in name for name in accuracy_metrics([[Answer(1.0), Answer(0.0)]], (1, 2)))


def test_a_prompt_with_too_few_answers_does_not_count_at_k():
    found = accuracy_metrics([answers("a! b"), answers("a!")], (2,))
    assert found["pass@2"] == 1.0
    assert found["accuracy"] == pytest.approx(0.75)


def test_several_sets_weigh_alike():
    first = accuracy_metrics([answers("a! a!")] * 3, (1, 2))
    second = accuracy_metrics([answers("a b")], (1,))
    together = over_sets([first, second])
    assert together["accuracy"] == pytest.approx(0.5)
    assert together["pass@1"] == pytest.approx(0.5)
    assert "pass@2" not in together
    assert "accuracy_low" not in together
    assert over_sets([first]) == first

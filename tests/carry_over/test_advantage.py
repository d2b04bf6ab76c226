"""Group-relative advantages."""

import json
from pathlib import Path

import numpy as np
import pytest

from tasks.carry_over.advantage import group_advantages

CASES = json.loads((Path(__file__).parents[1] / "train" / "dapo_loss.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed{case['seed']}")
def test_advantages_equal_an_independent_implementation(case):
    expected = case["expected"]["advantage"]
    assert np.allclose(group_advantages(case["rewards"], case["groups"]), expected, atol=1e-6)


def test_groups_are_joined_by_id_however_they_are_ordered_and_sized():
    interleaved = group_advantages([1, 0, 0, 1, 1, 5], ["a", "b", "a", "b", "b", "c"])
    assert np.allclose(interleaved[[0, 2]], group_advantages([1, 0], ["a", "a"]))
    assert np.allclose(interleaved[[1, 3, 4]], group_advantages([0, 1, 1], ["b", "b", "b"]))


def test_one_member_or_equal_members_have_no_advantage():
    assert group_advantages([3.0], ["a"]) == [0.0]
    assert list(group_advantages([2.0, 2.0, 2.0], ["a"] * 3)) == [0.0] * 3
    assert len(group_advantages([], [])) == 0


def test_without_scale_only_the_mean_is_taken_away():
    rewards, groups = [1.0, -1.0, -1.0, -1.0, 0.5, 0.0], ["a"] * 4 + ["b"] * 2
    assert group_advantages(rewards, groups, scale=False).tolist() == [1.5, -0.5, -0.5, -0.5, 0.25, -0.25]


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="2 rewards but 1 group ids"):
        group_advantages([1.0, 2.0], ["a"])

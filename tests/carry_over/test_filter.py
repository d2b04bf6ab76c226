"""What is trained, carried or let go."""

import dataclasses

import numpy as np
import pytest

from rows import group, row
from tasks.carry_over.filter import ConflictError, FilterRules, MixedVersionsError, carry_over, merge_deliveries
from tasks.rewards.overlong import soft_overlong_penalty
from tasks.trajectory import FinishReason, Status, violations

RULES = FilterRules(group_size=2, batch_groups=2, version=0, max_version_lag=2)


def rules(**changes):
    return dataclasses.replace(RULES, **changes)


def groups_of(rows):
    return list(dict.fromkeys(r.group_id for r in rows))


def test_accuracy_decides_and_never_the_shaped_reward():
    rewards = [-1 + soft_overlong_penalty(length, 20480, 4096) for length in (100, 17000, 18000, 20480)]
    assert np.allclose(rewards, [-1, -1.150, -1.395, -2], atol=1e-3)
    result = carry_over(group("g", [0.0] * 4, rewards=rewards), rules(group_size=4))
    assert (len(result.batch), len(result.filtered)) == (0, 4)
    equal_rewards = carry_over(group("g", [0.0, 1.0], rewards=[1.0, 1.0]), RULES)
    assert len(equal_rewards.batch) == 2


def test_interleaved_groups_are_joined_by_id():
    a, b = group("a", [0.0, 1.0]), group("b", [1.0, 0.0])
    result = carry_over([a[0], b[0], b[1], a[1]], RULES)
    assert groups_of(result.batch) == ["a", "b"]
    assert [(r.group_id, r.advantage > 0) for r in result.batch] == [
        ("a", False),
        ("a", True),
        ("b", True),
        ("b", False),
    ]


def test_unfinished_group_is_carried_whole_with_its_finished_members():
    members = [row(member=0, segments=[(3, 0)], accuracy=1.0), row(member=1, segments=[(5, 0)])]
    result = carry_over(members, RULES)
    assert result.carried == members
    unscored = [members[0], row(member=1, segments=[(5, 0)], status=Status.FINISHED)]
    assert carry_over(unscored, RULES).carried == unscored
    assert carry_over([row(member=0), row(member=1)], RULES).carried == [row(member=0), row(member=1)]


def test_a_failed_or_missing_member_fails_its_group_and_no_other():
    failed = [row("f", 0, segments=[(2, 0)], accuracy=1.0), row("f", 1, segments=[(2, 0)], status=Status.FAILED)]
    lone = [row("l", 0, segments=[(2, 0)], accuracy=1.0)]
    result = carry_over([*failed, *lone, *group("a", [0.0, 1.0])], RULES)
    assert result.failed == [*failed, *lone]
    assert groups_of(result.batch) == ["a"]


def test_surplus_is_trained_next_once_and_oldest_first():
    rows = [
        *group("new", [0.0, 1.0], iteration=3),
        *group("old", [1.0, 0.0], iteration=1),
        *group("mid", [1.0, 0.0], iteration=2),
    ]
    first = carry_over(rows, RULES)
    assert groups_of(first.batch) == ["old", "mid"]
    assert groups_of(first.carried) == ["new"]
    assert first.surplus_groups == 1
    second = carry_over([*first.carried, *group("later", [0.0, 1.0], iteration=4)], rules(version=1))
    assert groups_of(second.batch) == ["new", "later"]
    assert second.carried == []


def test_groups_of_one_age_keep_the_order_they_came_in():
    rows = [r for name in ("z", "a", "m") for r in group(name, [0.0, 1.0])]
    assert groups_of(carry_over(rows, rules(batch_groups=3)).batch) == ["z", "a", "m"]


def test_too_few_informative_groups_is_a_smaller_batch_and_none_an_empty_one():
    assert groups_of(carry_over(group("a", [0.0, 1.0]), rules(batch_groups=512)).batch) == ["a"]
    nothing = carry_over(group("a", [1.0, 1.0]), RULES)
    assert (nothing.batch, len(nothing.filtered)) == ([], 2)
    assert carry_over([], RULES).batch == []


@pytest.mark.parametrize(
    ("token_version", "trained_version", "masked"),
    [(0, 0, False), (0, 1, False), (0, 2, False), (0, 3, True), (5, 7, False), (5, 8, True)],
)
def test_lag_counts_from_the_token_to_the_version_trained(token_version, trained_version, masked):
    """max_version_lag = 2: a token two versions old is trained, one three versions old is not."""
    result = carry_over(group("g", [0.0, 1.0], segments=[(4, token_version)]), rules(version=trained_version))
    assert {r.masked_tokens for r in result.batch} == {4 if masked else 0}


def test_mask_leaves_out_only_the_stale_tokens_and_siblings_keep_theirs():
    members = [
        row(member=0, segments=[(3, 0), (4, 2), (5, 3)], accuracy=1.0),
        row(member=1, segments=[(6, 3)], accuracy=0.0),
    ]
    result = carry_over(members, rules(version=3))
    assert [r.masked_tokens for r in result.batch] == [3, 0]
    assert (result.trained_tokens, result.masked_tokens) == (15, 3)
    assert all(r.advantage for r in result.batch)


def test_discarding_lets_go_of_what_is_unfinished_or_beyond_the_batch():
    ready = [member for name in ("a", "b", "c") for member in group(name, [0.0, 1.0])]
    unfinished = [row("d", 0, segments=[(3, 0)]), row("d", 1)]
    result = carry_over([*ready, *unfinished], rules(unfinished="discard"))
    assert groups_of(result.batch) == ["a", "b"]
    assert groups_of(result.discarded) == ["c", "d"]
    assert result.carried == []
    assert result.lost_tokens == 0


@pytest.mark.parametrize(("oldest", "restarted"), [(1, False), (0, True)])
def test_reroll_restarts_a_stale_member_alone_before_it_would_be_trained_too_old(oldest, restarted):
    """Carried at version 2 beside a batch: version 3 comes next, for which version 1 is in time, version 0 is not."""
    members = [
        row(member=0, segments=[(3, oldest), (4, 2)]),
        row(member=1, segments=[(6, 2)], accuracy=0.0, iteration=2),
    ]
    result = carry_over([*members, *group("b", [0.0, 1.0], segments=[(4, 2)])], rules(version=2, on_stale="reroll"))
    first, second = result.carried
    assert second == members[1]
    if restarted:
        assert (first.status, first.tokens, first.attempt) == (Status.PENDING, 0, 1)
        assert (result.restarted, result.lost_tokens) == (1, 7)
    else:
        assert first == members[0]
        assert result.lost_tokens == 0


def test_without_an_update_the_version_stays_and_nothing_grows_stale():
    members = [row(member=0, segments=[(3, 0)]), row(member=1)]
    assert carry_over(members, rules(version=2, on_stale="reroll")).restarted == 0


def test_a_stale_scored_member_of_the_surplus_is_restarted_too():
    rows = [r for name in ("a", "b", "c") for r in group(name, [0.0, 1.0], segments=[(4, 0)])]
    result = carry_over(rows, rules(version=2, on_stale="reroll"))
    assert [(r.group_id, r.status) for r in result.carried] == [("c", Status.PENDING)] * 2


def test_overlong_filter_masks_truncated_responses_which_still_count_in_the_mean():
    members = [
        row(member=0, segments=[(4, 0)], accuracy=0.0, finish_reason=FinishReason.LENGTH),
        row(member=1, segments=[(4, 0)], accuracy=1.0),
    ]
    result = carry_over(members, rules(overlong_filter=True))
    assert [r.masked_tokens for r in result.batch] == [4, 0]
    assert result.batch[1].advantage == pytest.approx(0.7071, abs=1e-4)


def test_strict_mode_refuses_a_batch_of_mixed_versions():
    mixed = [row(member=0, segments=[(3, 0), (4, 1)], accuracy=1.0), row(member=1, segments=[(4, 1)], accuracy=0.0)]
    assert len(carry_over(mixed, rules(version=1)).batch) == 2
    with pytest.raises(MixedVersionsError, match="group g member 0"):
        carry_over(mixed, rules(version=1, strict=True))


def test_batch_rows_are_valid_and_have_their_advantage():
    result = carry_over(group("g", [0.0, 1.0, 1.0]), rules(group_size=3))
    assert not any(violations(r) for r in result.batch)
    assert np.allclose([r.advantage for r in result.batch], [-1.1547, 0.57735, 0.57735], atol=1e-4)


def test_the_same_delivery_twice_is_one():
    rows = group("g", [0.0, 1.0])
    assert merge_deliveries([*rows, *rows]) == (rows, 0)


def test_an_earlier_cut_gives_way_to_a_later_one_and_an_attempt_to_the_next():
    early, late = row(segments=[(3, 0)]), row(segments=[(3, 0), (2, 1)])
    assert merge_deliveries([late, early]) == ([late], 0)
    restarted = late.restarted()
    assert merge_deliveries([restarted, late]) == ([restarted], 5)


@pytest.mark.parametrize(
    "other",
    [
        row(segments=[(3, 1)]),
        dataclasses.replace(row(segments=[(3, 0)]), response_tokens=[9, 9, 9]),
        dataclasses.replace(row(segments=[(3, 0)]), logprobs=[-1, -1, -1]),
        row(segments=[(2, 0)], accuracy=1.0),
    ],
)
def test_conflicting_deliveries_are_an_error_that_names_both(other):
    with pytest.raises(ConflictError, match="group g member 0 attempt 0 was delivered twice") as error:
        merge_deliveries([row(segments=[(3, 0)]), other])
    assert str(error.value).count("tokens, segments") == 2


def test_two_different_scores_of_one_response_conflict():
    with pytest.raises(ConflictError):
        merge_deliveries([row(segments=[(3, 0)], accuracy=1.0), row(segments=[(3, 0)], accuracy=0.0)])

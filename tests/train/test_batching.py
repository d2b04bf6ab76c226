"""Which rows run together, and what a micro-batch holds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_rows import row

from tasks.train.batching import collate, micro_batches, mini_batches, row_tokens


def rows_of(*lengths):
    return [row([2], [4] * (length - 1), member=member) for member, length in enumerate(lengths)]


def members(batches):
    return [[[r.member for r in micro_batch] for micro_batch in rank] for rank in batches]


def test_mini_batches_keep_the_order_and_the_last_may_be_short():
    batches = mini_batches(rows_of(3, 2, 9, 4, 5), 2)
    assert [[r.member for r in batch] for batch in batches] == [[0, 1], [2, 3], [4]]
    assert mini_batches([], 2) == []


def test_rows_of_like_length_share_a_micro_batch():
    assert members(micro_batches(rows_of(10, 2, 9, 2), 20, ranks=1)) == [[[0, 2], [1, 3]]]


def test_a_row_longer_than_the_budget_runs_alone():
    assert members(micro_batches(rows_of(2, 50, 2), 10, ranks=1)) == [[[1], [0, 2]]]


def test_padding_counts_against_the_budget():
    assert members(micro_batches(rows_of(8, 2, 2), 16, ranks=1)) == [[[0], [1, 2]]]


def test_ranks_share_the_tokens_evenly():
    batches = micro_batches(rows_of(*[5] * 12), 1000, ranks=3)
    assert [[len(micro_batch) for micro_batch in rank] for rank in batches] == [[4], [4], [4]]


def test_ranks_without_rows_get_empty_micro_batches():
    assert members(micro_batches(rows_of(5), 10, ranks=3)) == [[[0]], [[]], [[]]]


@settings(deadline=None)
@given(
    st.lists(st.integers(2, 60), min_size=1, max_size=40),
    st.integers(1, 80),
    st.integers(1, 4),
)
def test_every_row_runs_once_within_the_budget_and_ranks_keep_step(lengths, budget, ranks):
    batches = micro_batches(rows_of(*lengths), budget, ranks)
    flat = [micro_batch for rank in batches for micro_batch in rank]
    assert len(batches) == ranks
    assert len({len(rank) for rank in batches}) == 1
    assert sorted(r.member for micro_batch in flat for r in micro_batch) == list(range(len(lengths)))
    for micro_batch in flat:
        assert len(micro_batch) <= 1 or len(micro_batch) * max(map(row_tokens, micro_batch)) <= budget


def test_collate_puts_rows_side_by_side_and_their_responses_one_after_the_other():
    batch = collate(
        [
            row([2, 3], [4, 5, 6], logprobs=[-1, -2, -3], segments=[(0, 2, 7), (2, 1, 8)], masked_tokens=1),
            row([9], [8], logprobs=[-4], advantage=-1.5),
        ]
    )
    assert batch.tokens.tolist() == [[2, 3, 4, 5, 6], [9, 8, 0, 0, 0]]
    assert batch.predicting.tolist() == [1, 2, 3, 5]
    assert batch.targets.tolist() == [4, 5, 6, 8]
    assert batch.behaviour_logprobs.tolist() == [-1, -2, -3, -4]
    assert batch.versions.tolist() == [7, 7, 8, 0]
    assert batch.advantages.tolist() == [1, 1, 1, -1.5]
    assert batch.loss_mask.tolist() == [False, True, True, True]


@pytest.mark.parametrize("rows", [[], [row([2], [])]], ids=["no rows", "no response"])
def test_collate_of_nothing_to_predict_still_has_a_token(rows):
    batch = collate(rows)
    assert batch.tokens.shape == (1, 1)
    assert all(len(values) == 0 for values in (batch.predicting, batch.targets, batch.loss_mask))

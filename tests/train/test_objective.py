"""The loss against an independent implementation, by hand, and under every split."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.train.objective import dapo_loss

CASES = json.loads(Path(__file__).with_name("dapo_loss.json").read_text())["cases"]
PLAIN = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}


def packed(rows):
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def padded(rows):
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[math.nan] * (longest - len(row))] for row in rows], dtype=torch.float64)


def close(found, expected):
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("shape", [packed, padded])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed {case['seed']}")
def test_oracle_loss_gradient_weights_and_clip_fractions(case, shape):
    expected = case["expected"]
    logprobs = shape(case["logprobs"]).requires_grad_()
    if shape is padded:
        advantages = torch.tensor(expected["advantage"], dtype=torch.float64)
        mask = ~torch.isnan(logprobs)
    else:
        advantages = packed([[a] * n for a, n in zip(expected["advantage"], case["lengths"], strict=True)])
        mask = torch.ones(len(logprobs), dtype=torch.bool)
    loss, metrics = dapo_loss(
        logprobs,
        shape(case["proximal_logprobs"]),
        shape(case["behaviour_logprobs"]),
        advantages,
        mask,
        **{name: case[name] for name in ("clip_low", "clip_high", "dual_clip", "tis_cap")},
    )
    loss.backward()
    close(loss.item(), expected["loss"])
    close(logprobs.grad[mask], packed(expected["grad_logprobs"]))
    close(metrics["clip_fraction"].item(), expected["clip_fraction"])
    close(metrics["dual_clip_fraction"].item(), expected["dual_clip_fraction"])
    weights = packed(expected["tis_weight"]) if expected["tis_weight"] else torch.ones(1, dtype=torch.float64)
    close(metrics["importance_weight"].item(), weights.mean().item())
    close(metrics["squared_importance_weight"].item(), weights.square().mean().item())


def test_a_column_of_advantages_is_one_per_row():
    logprobs, mask = torch.full((2, 3), -1.0), torch.ones(2, 3)
    flat, column = (
        dapo_loss(logprobs, logprobs, logprobs, advantages, mask, **PLAIN)[0]
        for advantages in (torch.tensor([1.0, -2.0]), torch.tensor([[1.0], [-2.0]]))
    )
    assert flat.item() == column.item() == 0.5


@pytest.mark.parametrize("split", [[4], [1, 3], [2, 2], [1, 1, 1, 1], [3, 1]])
def test_lengths_1_and_3_with_opposite_advantages_lose_one_half_however_they_are_split(split):
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0])
    logprobs = torch.full((4,), -0.5)
    parts = [
        dapo_loss(part, part, part, advantage, torch.ones_like(part), token_count=4, **PLAIN)[0]
        for part, advantage in zip(logprobs.split(split), advantages.split(split), strict=True)
    ]
    assert sum(parts).item() == 0.5


# One token, A = 1: logp −1.0, proximal −1.1, behaviour −1.5. Its ratios: e^0.1 to the proximal policy, e^0.5 (clipped
# to 1.28) to the behaviour policy; its weight e^0.4.
@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ({"proximal": -1.1, "tis_cap": 2.0}, -math.exp(0.4) * math.exp(0.1)),
        ({"proximal": -1.1, "tis_cap": 1.2}, -1.2 * math.exp(0.1)),
        ({"proximal": -1.5, "tis_cap": None}, -1.28),
        ({"proximal": -1.1, "tis_cap": None}, -math.exp(0.1)),
    ],
    ids=["decoupled", "decoupled, capped", "behaviour", "none"],
)
def test_corrections_by_hand(correction, expected):
    loss, _ = dapo_loss(
        torch.tensor([-1.0]),
        torch.tensor([correction["proximal"]]),
        torch.tensor([-1.5]),
        torch.tensor([1.0]),
        torch.tensor([True]),
        tis_cap=correction["tis_cap"],
        **PLAIN,
    )
    assert loss.item() == pytest.approx(expected)


def test_dual_clip_bounds_the_loss_of_a_bad_token_and_stops_its_gradient():
    logprobs = torch.tensor([-1.0], requires_grad=True)
    arguments = (torch.tensor([-4.0]), torch.tensor([-4.0]), torch.tensor([-2.0]), torch.tensor([True]))
    free, _ = dapo_loss(logprobs, *arguments, **PLAIN)
    bounded, metrics = dapo_loss(logprobs, *arguments, **PLAIN | {"dual_clip": 3.0})
    bounded.backward()
    assert free.item() == pytest.approx(2 * math.exp(3.0))
    assert bounded.item() == 6.0
    assert metrics["dual_clip_fraction"].item() == 1.0
    assert logprobs.grad.item() == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_nonfinite_logprobs_are_dropped_and_counted_without_nan_gradients(where, bad):
    inputs = [torch.tensor([-1.0, -2.0]) for _ in range(3)]
    inputs[where] = torch.tensor([-1.0, bad])
    inputs[0].requires_grad_()
    mask = torch.tensor([True, True])
    loss, metrics = dapo_loss(*inputs, torch.tensor([1.0, 1.0]), mask, tis_cap=2.0, **PLAIN)
    loss.backward()
    assert loss.item() == -0.5
    assert metrics["nonfinite_tokens"].item() == 1
    assert inputs[0].grad.tolist() == [-0.5, 0.0]


def test_masked_tokens_change_nothing_whatever_they_hold():
    logprobs = torch.tensor([-1.0, math.nan], requires_grad=True)
    other = torch.tensor([-1.0, math.inf])
    advantages, mask = torch.tensor([1.0, math.nan]), torch.tensor([True, False])
    loss, metrics = dapo_loss(logprobs, other, other, advantages, mask, tis_cap=2.0, **PLAIN | {"dual_clip": 3.0})
    loss.backward()
    assert (loss.item(), logprobs.grad.tolist()) == (-1.0, [-1.0, 0.0])
    assert metrics["nonfinite_tokens"].item() == 0


def test_a_mismatch_of_any_size_does_not_overflow():
    logprobs = torch.tensor([0.0, -5000.0], requires_grad=True)
    other, behaviour = torch.tensor([-5000.0, 0.0]), torch.tensor([-9000.0, 0.0])
    loss, metrics = dapo_loss(
        logprobs, other, behaviour, torch.tensor([-1.0, 1.0]), torch.ones(2), tis_cap=2.0, **PLAIN
    )
    loss.backward()
    assert all(map(math.isfinite, [loss.item(), *logprobs.grad.tolist(), *(m.item() for m in metrics.values())]))


def test_nothing_to_train_on_is_a_loss_of_zero():
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss, _ = dapo_loss(logprobs, logprobs, logprobs, torch.tensor([1.0]), torch.tensor([False]), **PLAIN)
    loss.backward()
    assert (loss.item(), logprobs.grad.tolist()) == (0.0, [0.0])


token = st.tuples(*[st.floats(-5.0, 0.0)] * 3, st.floats(-2.0, 2.0), st.booleans())


@settings(deadline=None, max_examples=60)
@given(st.lists(token, min_size=1, max_size=12), st.data())
def test_every_split_gives_the_same_loss_gradient_and_metrics(tokens, data):
    def run(splits):
        logprobs = columns[0].clone().requires_grad_()
        parts = [
            dapo_loss(*part, mask, clip_low=0.2, clip_high=0.28, dual_clip=3.0, tis_cap=2.0, token_count=count)
            for *part, mask in zip(logprobs.split(splits), *(c.split(splits) for c in columns[1:]), strict=True)
        ]
        sum(loss for loss, _ in parts).backward()
        return [
            sum(loss.item() for loss, _ in parts),
            *(sum(metrics[name].item() for _, metrics in parts) for name in parts[0][1]),
            *logprobs.grad.tolist(),
        ]

    columns = [torch.tensor(column) for column in zip(*tokens, strict=True)]
    count = max(int(columns[-1].sum()), 1)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens)))) | {len(tokens)})
    splits = [end - start for start, end in zip([0, *cuts], cuts, strict=False)]
    assert run(splits) == pytest.approx(run([len(tokens)]), abs=1e-5)

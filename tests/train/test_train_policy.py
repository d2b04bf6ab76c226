"""A whole iteration on one rank: the update itself, its schedule, what it skips and refuses, what it leaves alone."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from training_rows import Bench, assert_same_weights, random_rows, row

from tasks.train.fsdp import process_group
from tasks.train.stage import LogprobMismatchError, learning_rate


@pytest.fixture
def bench(tmp_path, tiny_model):
    return Bench(tmp_path, tiny_model)


def plain_update(directory, rows, config):
    """One AdamW update of the whole batch with transformers and autograd alone: on-policy, behaviour = trainer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    loss = 0.0
    for r in rows:
        logits = model(torch.tensor([[*r.prompt_tokens, *r.response_tokens]])).logits[0, len(r.prompt_tokens) - 1 : -1]
        logprobs = logits.log_softmax(-1)[range(r.tokens), r.response_tokens.tolist()]
        loss = loss - (logprobs - logprobs.detach()).exp().mul(r.advantage)[r.masked_tokens :].sum()
    (loss / sum(r.tokens - r.masked_tokens for r in rows)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_gradient_norm)
    torch.optim.AdamW(model.parameters(), lr=config.train.learning_rate, weight_decay=0.1).step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norm.item()


@pytest.mark.parametrize("budget", [1, 40, 4096])
def test_an_update_is_that_of_plain_autograd_however_the_rows_are_batched(bench, make_config, budget):
    rows = [*random_rows(7), row(response=range(4, 12), masked_tokens=5, member=7, advantage=-0.5)]
    config = make_config(
        objective={"correction": "none"},
        train={"mini_batch_responses": 8, "micro_batch_tokens": budget, "learning_rate": 1e-4},
    )
    expected, norm = plain_update(bench.policy, rows, config)
    metrics = bench.train(config, rows)
    assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["updates"] == 1
    assert_same_weights(bench.weights("next"), expected, atol=1e-5)


def test_learning_rate_warms_up_linearly_and_stays(make_config):
    config = make_config(train={"learning_rate": 1.0, "warmup_updates": 4})
    assert [learning_rate(config, update) for update in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate(make_config(train={"learning_rate": 1.0, "warmup_updates": 0}), 0) == 1.0


def test_a_resumed_optimizer_equals_an_uninterrupted_one_bit_for_bit(bench, make_config):
    rows = random_rows(8)
    config = make_config(objective={"correction": "behaviour"}, train={"warmup_updates": 3})
    bench.train(config, rows, name="whole")
    bench.train(config, rows[:4], name="first")
    resumed = {"policy": bench.path("first", "policy"), "optimizer": bench.path("first", "optimizer")}
    metrics = bench.train(config, rows[4:], name="second", **resumed)
    assert metrics["learning_rate"] == pytest.approx(2 / 3 * 1e-3)
    assert_same_weights(bench.weights("second"), bench.weights("whole"))


def test_settings_of_the_optimizer_are_the_recipes_also_after_a_resume(bench, make_config):
    rows = random_rows(4)
    bench.train(make_config(), rows, name="first")
    resumed = {"policy": bench.path("first", "policy"), "optimizer": bench.path("first", "optimizer")}
    without_decay = make_config(train={"weight_decay": 0.0})
    bench.train(make_config(), rows, name="decayed", **resumed)
    bench.train(without_decay, rows, name="kept", **resumed)
    name = "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(
        bench.weights("kept")[name] - bench.weights("decayed")[name],
        0.1 * 1e-3 * bench.weights("first")[name],
        rtol=0.0,
        atol=1e-6,
    )


def test_an_update_without_a_finite_gradient_is_skipped_counted_and_said(bench, make_config, capsys):
    rows = [row(member=member, advantage=math.inf if member == 0 else 1.0) for member in range(8)]
    metrics = bench.train(make_config(train={"learning_rate": 1e-2, "warmup_updates": 10}), rows)
    assert (metrics["updates"], metrics["skipped_updates"]) == (1, 1)
    assert metrics["learning_rate"] == pytest.approx(1e-3)  # the skipped one does not count for the warm-up
    assert all(map(math.isfinite, metrics.values()))
    assert "update 1 is skipped" in capsys.readouterr().out


def test_a_batch_masked_throughout_makes_no_update(bench, make_config):
    metrics = bench.train(make_config(), [row(member=member, masked_tokens=3) for member in range(4)])
    assert (metrics["updates"], metrics["trained_tokens"], metrics["masked_tokens"]) == (0, 0, 12)
    assert_same_weights(bench.weights("next"), bench.weights())


def test_tokens_without_a_finite_logprob_are_left_out_and_counted(bench, make_config):
    rows = [row(member=member, logprobs=[-1.0, math.nan, -math.inf]) for member in range(4)]
    metrics = bench.train(make_config(), rows)
    assert (metrics["nonfinite_tokens"], metrics["updates"]) == (8, 1)
    assert all(map(math.isfinite, metrics.values()))


def exact_logprobs(bench, r, off_by=0.0):
    """The row as an engine that agrees with the trainer, or is off by so many nats, would have sampled it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(bench.policy, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*r.prompt_tokens, *r.response_tokens]])).logits[0, len(r.prompt_tokens) - 1 : -1]
    logprobs = logits.log_softmax(-1)[range(r.tokens), r.response_tokens.tolist()].numpy()
    return row(r.prompt_tokens, r.response_tokens, member=r.member, segments=r.segments, logprobs=logprobs + off_by)


def later_policy(bench, make_config):
    """Version 1, with the weights of version 0."""
    bench.train(make_config(), [row(masked_tokens=3)], name="later")
    return bench.path("later", "policy")


def test_fresh_and_stale_tokens_are_compared_with_the_engine_apart(bench, make_config):
    fresh = exact_logprobs(bench, row(segments=[(0, 3, 1)]))
    mixed = exact_logprobs(bench, row(segments=[(0, 2, 0), (2, 1, 1)], member=1), off_by=np.array([0.25, 0.25, 0.0]))
    metrics = bench.train(make_config(), [fresh, mixed], policy=later_policy(bench, make_config))
    assert metrics["logprob_difference_fresh"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["logprob_difference_stale"] == pytest.approx(0.25, abs=1e-5)
    assert metrics["off_policy_share"] == metrics["mean_version_lag"] == pytest.approx(2 / 6)
    assert metrics["importance_weight"] == pytest.approx((4 + 2 * math.exp(-0.25)) / 6, abs=1e-5)
    assert metrics["effective_sample_share"] == pytest.approx(
        (4 + 2 * math.exp(-0.25)) ** 2 / 6 / (4 + 2 * math.exp(-0.5)), abs=1e-5
    )
    assert (metrics["clip_fraction"], metrics["kl"]) == (0.0, pytest.approx(0.0, abs=1e-6))


def test_an_engine_that_disagrees_on_fresh_tokens_stops_training_before_the_first_update(bench, make_config):
    config = make_config(objective={"max_logprob_difference": 0.1})
    rows = [exact_logprobs(bench, r, off_by=0.25) for r in random_rows(4)]
    before = dist.is_initialized()
    with pytest.raises(LogprobMismatchError, match=r"differ by 0\.25 nats .*max_logprob_difference = 0\.1"):
        bench.train(config, rows)
    assert not Path(bench.path("next", "policy")).exists()
    assert dist.is_initialized() == before


def test_an_engine_that_differs_on_stale_tokens_alone_is_no_fault(bench, make_config):
    config = make_config(objective={"max_logprob_difference": 0.1})
    rows = [exact_logprobs(bench, r, off_by=0.25) for r in random_rows(4)]
    assert bench.train(config, rows, policy=later_policy(bench, make_config))["updates"] == 1


def test_the_sampling_temperature_is_the_trainers(bench, make_config):
    rows = random_rows(4)
    config = make_config(sampling={"temperature": 0.5})
    cold, warm = (bench.train(c, rows, name=n) for c, n in ((config, "cold"), (make_config(), "warm")))
    assert cold["entropy"] < warm["entropy"]


def test_an_update_makes_good_tokens_likelier_and_bad_ones_less_likely(bench, make_config):
    good, bad = row(response=[4, 5, 6]), row(response=[7, 8, 9], member=1, advantage=-1.0)
    bench.train(make_config(objective={"correction": "none"}), [good, bad])
    before, after = bench.policy, bench.path("next", "policy")
    for r, sign in ((good, 1), (bad, -1)):
        bench.policy = before
        old = exact_logprobs(bench, r).logprobs.sum()
        bench.policy = after
        assert sign * (exact_logprobs(bench, r).logprobs.sum() - old) > 0


def test_nothing_global_changes(bench, make_config):
    def state():
        return torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), dist.is_initialized()

    before = state()
    bench.train(make_config(train={"param_dtype": "bfloat16"}), random_rows(4))
    assert state() == before


def test_a_process_group_that_exists_is_used_and_left(bench, make_config):
    with process_group():  # as an engine in the same process makes one
        existing = dist.group.WORLD
        assert bench.train(make_config(), random_rows(4))["updates"] == 1
        assert dist.group.WORLD is existing

"""Options of the objective and the optimizer: each against plain autograd or numbers by hand."""

import math

import pytest
import torch
import transformers
from torch._dynamo.utils import counters
from training_rows import Bench, assert_same_weights, random_rows

from tasks.config import ConfigError
from tasks.train.objective import gspo_loss, reference_kl
from tasks.train.stage import learning_rate

SEQUENCE = {"ratio": "sequence", "correction": "none"}
STRICT = {"enabled": False}


@pytest.fixture
def bench(tmp_path, tiny_model):
    return Bench(tmp_path, tiny_model)


# Two responses: of 2 tokens, mean difference to the proximal policy 0.3, and of 1 token, −0.1.
LOGPROBS = torch.tensor([-1.0, -2.0, -0.5])
PROXIMAL = torch.tensor([-1.2, -2.4, -0.4])
RESPONSE = torch.tensor([0, 0, 1])
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


@pytest.mark.parametrize(
    ("advantages", "expected", "clipped"),
    [
        ((1.0, 1.0), -(1.28 + math.exp(-0.1)) / 2, 0.5),  # e^0.3 = 1.35 is clipped
        ((-1.0, 2.0), (math.exp(0.3) - 2 * math.exp(-0.1)) / 2, 0.0),  # of a bad response nothing is clipped there
    ],
)
def test_sequence_ratio_by_hand(advantages, expected, clipped):
    of_tokens = torch.tensor(advantages)[RESPONSE]
    loss, metrics = gspo_loss(LOGPROBS, PROXIMAL, of_tokens, torch.ones(3), RESPONSE, **CLIPS)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert metrics["clip_fraction"].item() == clipped
    assert metrics["ratio"].item() == pytest.approx((math.exp(0.3) + math.exp(-0.1)) / 2, abs=1e-6)


def test_sequence_ratio_gives_every_token_of_a_response_the_same_gradient_and_skips_what_is_masked():
    logprobs = LOGPROBS.clone().requires_grad_()
    mask = torch.tensor([1, 1, 0])
    loss, _ = gspo_loss(logprobs, LOGPROBS, torch.ones(3), mask, RESPONSE, **CLIPS)
    loss.backward()
    assert logprobs.grad.tolist() == [-0.5, -0.5, 0.0]  # one response, of two tokens


def test_sequence_ratio_of_micro_batches_adds_up():
    whole, _ = gspo_loss(LOGPROBS, PROXIMAL, torch.ones(3), torch.ones(3), RESPONSE, **CLIPS)
    parts = [
        gspo_loss(LOGPROBS[part], PROXIMAL[part], torch.ones(n), torch.ones(n), rows, response_count=2, **CLIPS)[0]
        for part, n, rows in ((slice(0, 2), 2, torch.zeros(2, dtype=int)), (slice(2, 3), 1, torch.zeros(1, dtype=int)))
    ]
    assert sum(parts).item() == pytest.approx(whole.item())


def test_reference_kl_by_hand_is_never_negative_and_pulls_towards_the_reference():
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, -0.5])
    found = reference_kl(logprobs, reference, torch.ones(3), 3)
    by_hand = sum(math.exp(difference) - 1 - difference for difference in (-0.5, 0.0, 0.5)) / 3
    assert found.item() == pytest.approx(by_hand, abs=1e-6)
    found.backward()
    assert logprobs.grad[0] > 0 > logprobs.grad[2]
    assert logprobs.grad[1] == 0


def moved_loss(directory, reference_directory, rows, *, kl=0.0, entropy=0.0, sequence=False):
    """Plain transformers: loss and gradient norm at the first update, where every ratio is 1."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, reference = (load(path, dtype=torch.float32).eval() for path in (directory, reference_directory))
    total, count = 0.0, sum(r.tokens for r in rows)
    for r in rows:
        tokens = torch.tensor([[*r.prompt_tokens, *r.response_tokens]])
        part = slice(len(r.prompt_tokens) - 1, -1)
        of_all = model(tokens).logits[0, part].log_softmax(-1)
        picked = (range(r.tokens), r.response_tokens.tolist())
        ratios = (of_all[picked] - of_all[picked].detach()).exp()
        weight = 1 / len(rows) / r.tokens if sequence else 1 / count
        total = total - weight * r.advantage * ratios.sum()
        with torch.no_grad():
            referred = reference(tokens).logits[0, part].log_softmax(-1)[picked]
        difference = referred - of_all[picked]
        total = total + kl * (difference.exp() - 1 - difference).sum() / count
        total = total + entropy * (of_all.exp() * of_all).sum() / count
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    return total.item(), norm.item()


@pytest.mark.parametrize(
    ("objective", "options"),
    [
        ({"correction": "none", "kl_coefficient": 0.5}, {"kl": 0.5}),
        ({"correction": "none", "entropy_coefficient": 0.3}, {"entropy": 0.3}),
        (SEQUENCE, {"sequence": True}),
    ],
    ids=["kl", "entropy", "sequence"],
)
@pytest.mark.parametrize("budget", [40, 4096])
def test_each_term_has_the_loss_and_gradient_of_plain_autograd(
    bench, make_config, tiny_model, objective, options, budget
):
    rows = random_rows(8)
    config = make_config(
        model={"path": str(tiny_model)},
        objective=objective,
        partial_rollout=STRICT,
        train={"mini_batch_responses": 8, "micro_batch_tokens": budget, "learning_rate": 1e-2},
    )
    bench.train(config, random_rows(8, seed=1), name="away")  # from the reference
    policy = bench.path("away", "policy")
    metrics = bench.train(config, rows, policy=policy)
    loss, norm = moved_loss(policy, tiny_model, rows, **options)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert ("reference_kl" in metrics) == ("kl" in options)


def test_schedules_fall_to_their_end_at_the_last_update(make_config):
    def rates(**train):
        settings = {"learning_rate": 1.0, "warmup_updates": 2, "final_learning_rate": 0.2} | train
        return [learning_rate(make_config(iterations=3, train=settings), update) for update in range(6)]

    assert rates(schedule="constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(schedule="linear") == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])
    cosine = [0.2 + 0.8 * (1 + math.cos(math.pi * step / 4)) / 2 for step in (1, 2, 3, 4)]
    assert rates(schedule="cosine") == pytest.approx([0.5, 1.0, *cosine])


def test_bfloat16_master_weights_lose_small_updates_and_float32_keeps_them(bench, make_config):
    rows = random_rows(4)
    start = bench.weights()
    for dtype in ("float32", "bfloat16"):
        config = make_config(train={"master_dtype": dtype, "param_dtype": "bfloat16", "learning_rate": 1e-6})
        assert bench.train(config, rows, name=dtype)["updates"] == 1
    moved = {
        dtype: sum(
            (bench.weights(dtype)[name] != tensor.to(getattr(torch, dtype)).float()).sum()
            for name, tensor in start.items()
        )
        for dtype in ("float32", "bfloat16")
    }
    total = sum(tensor.numel() for tensor in start.values())
    assert moved["bfloat16"] < 0.1 * total
    assert moved["float32"] > 0.5 * total


@torch._dynamo.config.patch(disable=True)
def test_compiled_layers_train_as_plain_ones(bench, make_config, monkeypatch):
    """Captured, differentiated and run by torch.compile; the C++ it would generate, half a minute of it, is not."""
    plain_compile = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: plain_compile(self, backend="aot_eager", **options)
    )
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # as with `disable`, what an engine in this process may have done
    rows = random_rows(4)
    captured = counters["frames"]
    for name, compiled in (("plain", False), ("compiled", True)):
        before = captured["ok"]
        bench.train(make_config(train={"compile": compiled, "learning_rate": 1e-4}), rows, name=name)
        assert (captured["ok"] > before) == compiled
    assert_same_weights(bench.weights("compiled"), bench.weights("plain"), atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_fused_kernels_are_refused_without_a_gpu(bench, make_config):
    with pytest.raises(ConfigError, match=r"train\.fused_kernels: true needs a GPU"):
        bench.train(make_config(train={"fused_kernels": True}), random_rows(4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Liger's fused kernels need a GPU")
def test_fused_kernels_train_as_plain_ones(bench, make_config):
    pytest.importorskip("liger_kernel")
    rows = random_rows(4)
    for name, fused in (("plain", False), ("fused", True)):
        bench.train(make_config(train={"fused_kernels": fused, "learning_rate": 1e-4}), rows, name=name)
    assert_same_weights(bench.weights("fused"), bench.weights("plain"), atol=1e-4)

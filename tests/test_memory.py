"""What a stage will need, against what the machine has, before anything large is loaded."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tasks import memory
from tasks.config import ConfigError
from tasks.generate.engine import warm_engine
from tasks.memory import available_bytes, check_memory, parameter_count, sampling_needs, training_needs
from tasks.policy import publish_initial_policy

GIB = 2**30
SEVEN_B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
}


@pytest.fixture
def seven_b(tmp_path, monkeypatch):
    """Qwen2.5-7B as far as its shape goes."""
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_B))
    monkeypatch.setattr(memory, "parameter_count", lambda _directory: 7_615_616_512)
    return str(tmp_path)


def test_parameters_are_counted_from_the_headers(tmp_path):
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "one.safetensors", metadata={"format": "pt"})
    save_file({"c": torch.zeros(2, 2, 2, dtype=torch.bfloat16)}, tmp_path / "two.safetensors")
    assert parameter_count(str(tmp_path)) == 15 + 7 + 8


def test_training_of_7b_needs_what_is_known_of_it(seven_b, make_config):
    config = make_config(train={"ranks": 8, "param_dtype": "bfloat16", "activation_checkpointing": True})
    needs = training_needs(config, seven_b, on_gpu=True)
    assert needs["weights, gradients and moments (train.ranks)"] / GIB == pytest.approx(14.2, abs=0.1)
    assert training_needs(make_config(train={"ranks": 1}), seven_b, on_gpu=True)[
        "weights, gradients and moments (train.ranks)"
    ] / GIB == pytest.approx(113.5, abs=0.5)


def test_key_value_cache_of_7b_holds_at_least_the_longest_response(seven_b, make_config):
    config = make_config(sampling={"max_response_tokens": 32_752}, engine={"dtype": "bfloat16", "kv_cache_gib": 0.5})
    needs = sampling_needs(config, seven_b, on_gpu=True)
    assert needs["weights (engine.dtype)"] / GIB == pytest.approx(14.2, abs=0.1)
    assert max(needs.values()) == needs["weights (engine.dtype)"]
    assert needs["key-value cache (engine.kv_cache_gib, or of the longest response)"] / GIB == pytest.approx(1.75)


def test_what_does_not_fit_is_said_part_by_part(seven_b, make_config):
    needs = training_needs(make_config(train={"micro_batch_tokens": 1024}), seven_b, on_gpu=False)
    with pytest.raises(
        ConfigError, match=r"train needs about 1\d\d.* GiB, but 24.0 GiB are available here: weights, gradie"
    ):
        check_memory("train", needs, 24 * GIB)
    check_memory("train", needs, 500 * GIB)


def test_an_engine_that_cannot_fit_is_refused_before_it_starts(tmp_path, tiny_model, make_config):
    policy = str(tmp_path / "policy")
    publish_initial_policy(str(tiny_model), policy)
    with pytest.raises(ConfigError, match=r"generate needs about .* \(engine.kv_cache_gib"):
        warm_engine(make_config(engine={"kv_cache_gib": 100_000}), policy)


def test_training_that_cannot_fit_is_refused_before_it_starts(tmp_path, tiny_model, make_config):
    from training_rows import Bench, random_rows

    bench = Bench(tmp_path, tiny_model)
    with pytest.raises(ConfigError, match=r"train needs about .* activations \(train.micro_batch_tokens\)"):
        bench.train(make_config(train={"micro_batch_tokens": 10**12}), random_rows(4))


def test_available_memory_is_that_of_this_machine():
    assert 0.1 * GIB < available_bytes() < 10_000 * GIB

"""Log-probs of the trained model against transformers itself, for several architectures and settings."""

import math

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from training_rows import random_rows, row

from conftest import recipe
from tasks.config import RunConfig
from tasks.train import fsdp
from tasks.train.batching import collate
from tasks.train.fsdp import ModelError, load_model, process_group, token_logprobs

SMALL = {
    "vocab_size": 42,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
ARCHITECTURES = {
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 1.5, "sliding_window": 4},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "resid_pdrop": 0.5},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def save_model(directory, kind, dtype=torch.float32, **settings):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SMALL | ARCHITECTURES.get(kind, {}) | settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    model.to(dtype).save_pretrained(directory)
    return str(directory)


def load(directory, temperature=1.0, **train):
    return load_model(RunConfig.model_validate(recipe(sampling={"temperature": temperature}, train=train)), directory)


@pytest.fixture(autouse=True)
def _one_rank():
    with process_group():
        yield


def of_transformers(directory, rows, temperature):
    """Log-probs and entropies the plain way: a row at a time, all logits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    logprobs, entropies = [], []
    for r in rows:
        tokens = torch.tensor([[*r.prompt_tokens, *r.response_tokens]])
        with torch.no_grad():
            logits = model(tokens).logits[0, len(r.prompt_tokens) - 1 : -1] / temperature
        all_logprobs = logits.log_softmax(-1)
        logprobs.append(all_logprobs[range(r.tokens), r.response_tokens.tolist()])
        entropies.append(-(all_logprobs.exp() * all_logprobs).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_rows_that_run_together_have_the_logprobs_of_each_alone(tmp_path, kind):
    directory, rows = save_model(tmp_path, kind), random_rows(5)
    with torch.no_grad():
        logprobs, entropies = load(directory, temperature=0.7)(collate(rows))
    expected_logprobs, expected_entropies = of_transformers(directory, rows, 0.7)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=0.0, atol=2e-5)
    torch.testing.assert_close(entropies, expected_entropies, rtol=0.0, atol=2e-5)


def test_no_attention_kernel_lets_rows_see_each_other(tmp_path):
    directory, rows = save_model(tmp_path, "qwen3"), random_rows(5)
    with torch.no_grad():
        sdpa, eager = (load(directory, attention=kernel)(collate(rows))[0] for kernel in ("sdpa", "eager"))
    torch.testing.assert_close(sdpa, eager, rtol=0.0, atol=1e-5)


def test_logits_are_divided_by_the_temperature():
    logprobs, _ = token_logprobs(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), temperature=0.5)
    assert logprobs.item() == pytest.approx(-0.0181, abs=1e-4)


def test_entropy_of_impossible_tokens_is_zero_and_of_even_odds_log_2():
    _, entropies = token_logprobs(torch.tensor([[0.0, -math.inf], [1.0, 1.0]]), torch.tensor([0, 0]), temperature=1.0)
    assert entropies.tolist() == pytest.approx([0.0, math.log(2)])


def gradients(model, rows):
    logprobs, _ = model(collate(rows))
    logprobs.sum().backward()
    grads = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return grads


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_chunks_of_logits_and_recomputed_activations_change_no_gradient(tmp_path, kind, monkeypatch):
    directory, rows = save_model(tmp_path, kind), random_rows(5)
    expected = gradients(load(directory), rows)
    monkeypatch.setattr(fsdp, "LOGIT_CHUNK", 3)
    found = gradients(load(directory, activation_checkpointing=True), rows)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5)
        assert gradient.abs().max() > 0


def test_logits_exist_for_a_chunk_of_response_positions_only(tmp_path, monkeypatch):
    model, sizes = load(save_model(tmp_path, "qwen3")), []
    monkeypatch.setattr(fsdp, "LOGIT_CHUNK", 4)

    def note_size(_module, _inputs, logits):
        sizes.append(logits.numel() // 42)

    model.model.lm_head.register_forward_hook(note_size)
    with torch.no_grad():
        model(collate([row(range(2, 40), range(4, 13))]))
    assert sizes == [4, 4, 1]


def test_bfloat16_computes_near_float32_and_keeps_float32_weights(tmp_path):
    directory, rows = save_model(tmp_path, "qwen3"), random_rows(5)
    model = load(directory, param_dtype="bfloat16")
    logprobs, _ = model(collate(rows))
    logprobs.sum().backward()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    difference = (logprobs - of_transformers(directory, rows, 1.0)[0]).abs().mean().item()
    assert 0.0 < difference < 0.05


def test_a_rank_without_rows_takes_part_with_gradient_zero(tmp_path):
    assert all(not gradient.any() for gradient in gradients(load(save_model(tmp_path, "qwen3")), []).values())


def test_layers_are_sharded_apart_from_the_embeddings(tmp_path):
    model = load(save_model(tmp_path, "qwen3"))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert sum(type(module).__name__.startswith("FSDP") for module in model.modules()) == 3


def test_an_unknown_way_to_make_logits_is_refused(tmp_path):
    directory = save_model(tmp_path, "granite", logits_scaling=4.0)
    with pytest.raises(ModelError, match="GraniteForCausalLM makes its logits in a way"):
        load(directory)


def test_weight_files_that_lack_a_tensor_are_refused(tmp_path):
    directory = save_model(tmp_path, "qwen3")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack model\.norm\.weight"):
        load(directory)


def test_a_process_group_that_exists_is_used_and_left(tmp_path):
    existing = dist.group.WORLD
    with process_group():
        load(save_model(tmp_path, "qwen3"))
    assert dist.group.WORLD is existing

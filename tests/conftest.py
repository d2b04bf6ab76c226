"""What several tests need: a small recipe, a tiny model directory with a tokenizer, prompts for it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest

from tasks.config import RunConfig

SECRET = "marked-secret-never-to-be-written"
ALPHABET = "0123456789+-*=;., abcdefghijklmnopqrstuvwxyz"


def recipe(**sections) -> dict:
    """A complete small recipe as plain settings; keyword arguments replace or extend its sections."""
    settings = {
        "name": "test",
        "iterations": 2,
        "model": {"path": "model"},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 16},
        "reward": {"function": "tasks.rewards.sums:compute_score", "overlong_cache": 0, "workers": 0},
        "sampling": {"max_response_tokens": 48},
        "partial_rollout": {"max_in_flight": 16},
        "engine": {"dtype": "float32", "kv_cache_gib": 0.25, "enforce_eager": True},
        "train": {
            "batch_groups": 2,
            "group_size": 4,
            "mini_batch_responses": 4,
            "learning_rate": 1e-3,
            "warmup_updates": 0,
            "param_dtype": "float32",
            "activation_checkpointing": False,
        },
    }
    for name, value in sections.items():
        settings[name] = {**settings[name], **value} if isinstance(value, dict) and name in settings else value
    return settings


@pytest.fixture
def make_config():
    return lambda **sections: RunConfig.model_validate(recipe(**sections))


def save_tiny_model(directory: Path, seed: int = 0, **architecture) -> Path:
    """A Qwen3 with random weights and a character tokenizer, as a Hugging Face directory."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(directory)
    settings = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**(settings | architecture)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # far from uniform, so that a wrong distribution shows
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def write_prompts(path: Path, count: int = 8, **changes) -> Path:
    """`count` rows in verl's schema as JSONL."""
    rows = [
        {
            "data_source": "test",
            "prompt": [{"role": "user", "content": f"{index}+{index}="}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * index % 10)},
            "extra_info": {"index": index},
        }
        | changes
        for index in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_until_listening(server: subprocess.Popen, port: int) -> None:
    """Until the server takes connections, or has ended."""
    while server.poll() is None and socket.socket().connect_ex(("127.0.0.1", port)):
        time.sleep(0.05)


@pytest.fixture(scope="session")
def s3_server():
    """A real S3 server in a process of its own, and the usual variables to reach it; one for all tests, since fsspec
    remembers its connections."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL
    )
    wait_until_listening(server, port)
    yield {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }
    server.kill()
    server.wait()


@pytest.fixture
def s3(s3_server, monkeypatch, request):
    """An empty bucket."""
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{abs(hash(request.node.nodeid))}"
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}"


def one_iteration(config: RunConfig, folder: Path) -> dict[str, float]:
    """Generate, carry over and train from `model.path`, on directories in `folder`; returns what train measured.

    They are `policy`, `rollouts`, `batch`, `carry` and, with the weights that were trained, `new`.
    """
    from tasks.carry_over.shards import write_shards
    from tasks.carry_over.stage import carry_over_rollouts
    from tasks.generate.stage import generate_rollouts
    from tasks.policy import publish_initial_policy
    from tasks.train.launch import train_on_ranks
    from tasks.train.stage import Directories

    policy, rollouts, batch, carry = (str(folder / part) for part in ("policy", "rollouts", "batch", "carry"))
    publish_initial_policy(config.model.path, policy)
    write_shards([], str(folder / "nothing"))
    generate_rollouts(config, 0, policy, str(folder / "nothing"), rollouts)
    carry_over_rollouts(config, 0, rollouts, batch, carry)
    return train_on_ranks(
        config,
        Directories(
            policy=policy,
            optimizer=None,
            batch=batch,
            new_policy=str(folder / "new"),
            new_optimizer=str(folder / "optimizer"),
            progress=str(folder / "progress"),
        ),
    ).metrics

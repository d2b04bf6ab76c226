"""Whether a stage's memory fits the machine, worked out from the settings before anything large is loaded.

The sums are those of the parts that dominate: weights, gradients, optimizer, activations, logits, key-value cache. They
are meant to catch a setting that is wrong by a factor, not to predict the last percent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from tasks.config import ConfigError, RunConfig

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
RUNTIME = {"libraries": 1.0 * GIB}
LOGIT_CHUNK = 1024  # response positions whose logits the trainer holds at once


def parameter_count(model_directory: str) -> int:
    """Parameters in a directory's safetensors files, from their headers alone."""
    count = 0
    for path in sorted(Path(model_directory).glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        count += sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return count


def sampling_needs(config: RunConfig, model_directory: str, on_gpu: bool) -> dict[str, float]:
    """Bytes that generate needs, by what for. On a CPU the engine keeps a packed copy of the weights beside them."""
    weights = parameter_count(model_directory) * BYTES[config.engine.dtype]
    shape = _architecture(model_directory)
    heads = shape.get("num_key_value_heads") or shape["num_attention_heads"]
    width = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    longest = 2 * shape["num_hidden_layers"] * heads * width * BYTES[config.engine.dtype] * config.max_context_tokens
    cache = (config.engine.kv_cache_gib or 0.0) * GIB
    return RUNTIME | {
        "weights (engine.dtype)": float(weights if on_gpu else 2 * weights),
        "key-value cache (engine.kv_cache_gib, or of the longest response)": float(max(cache, longest)),
    }


def training_needs(config: RunConfig, model_directory: str, on_gpu: bool) -> dict[str, float]:
    """Bytes that train needs: on a GPU those of one rank, on a CPU those of all ranks, which share the machine."""
    train, shape = config.train, _architecture(model_directory)
    parameters = parameter_count(model_directory)
    states = 4 * BYTES[train.master_dtype] * parameters  # weights, gradients and two moments, sharded over the ranks
    tokens = max(train.micro_batch_tokens, config.max_context_tokens)
    layers = shape["num_hidden_layers"]
    # 17 values per token, layer and hidden unit (arXiv:2205.05198 eq. 2, attention matrices never being whole); with
    # checkpointing one of each layer, and all of a single one.
    kept = layers + 17 if train.activation_checkpointing else 17 * layers
    activations = kept * BYTES[train.param_dtype] * tokens * shape["hidden_size"]
    logits = 3 * 4 * LOGIT_CHUNK * shape["vocab_size"]
    each = {"activations (train.micro_batch_tokens)": float(activations), "logits": float(logits)}
    if on_gpu:
        return RUNTIME | {"weights, gradients and moments (train.ranks)": states / train.ranks} | each
    # every rank reads the whole model before it is sharded
    loading = BYTES[train.master_dtype] * parameters * train.ranks
    return {
        "libraries": RUNTIME["libraries"] * train.ranks,
        "weights, gradients and moments": float(states + loading),
        **{name: value * train.ranks for name, value in each.items()},
    }


def _architecture(model_directory: str) -> Mapping[str, int]:
    content = json.loads(Path(model_directory, "config.json").read_text())
    return content.get("text_config", content)


def check_memory(stage: str, needs: Mapping[str, float], available: float) -> None:
    """Raises ConfigError with needed against available, part by part, if it cannot fit."""
    needed = sum(needs.values())
    if needed > available:
        parts = ", ".join(
            f"{name} {value / GIB:.2f}" for name, value in sorted(needs.items(), key=lambda part: -part[1])
        )
        raise ConfigError(
            f"{stage} needs about {needed / GIB:.1f} GiB, but {available / GIB:.1f} GiB are available here: {parts}; "
            "lower the settings named in brackets, or use a larger machine"
        )


def available_bytes() -> float:
    """Memory that this process may still use: the machine's, or what its container is allowed."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = float(facts["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (allowed := limit.read_text().strip()) != "max":
        available = min(available, float(allowed) - float(used.read_text()))
    return available


def device_bytes() -> float | None:
    """Memory free on this process's GPU; None without one."""
    import torch

    return float(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None

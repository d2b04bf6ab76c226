"""The trained model: any Hugging Face causal LM under FSDP2, asked only for log-probs of response tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from tasks.config import RunConfig
from tasks.train.batching import Packed

LOGIT_CHUNK = 1024  # response positions whose logits exist at once


class ModelError(RuntimeError):
    """The model cannot be trained as it is; the message says why."""


class PolicyModel(nn.Module):
    """A causal LM that maps a packed micro-batch to log-probs and entropies of its response tokens.

    Logits are computed only at positions that predict a response token, and `LOGIT_CHUNK` of them at a time, recomputed
    in the backward pass: memory grows neither with the prompt nor with vocabulary × length.
    """

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """logprobs [T] float32 of `packed.targets` and entropies [T] float32 (nats), at the sampling temperature."""
        decoder = self.model.get_decoder()
        hidden = decoder(
            input_ids=packed.tokens[None], position_ids=packed.positions[None], use_cache=False
        ).last_hidden_state[0]
        chunks = zip(packed.predicting.split(LOGIT_CHUNK), packed.targets.split(LOGIT_CHUNK), strict=True)
        parts = [checkpoint(self._logprobs, hidden[where], targets, use_reentrant=False) for where, targets in chunks]
        logprobs, entropies = (torch.cat(values) for values in zip(*parts, strict=True))
        # A rank without response tokens still takes part in the backward pass, with gradient 0.
        return logprobs + 0.0 * hidden.float().sum() if not len(packed.targets) else logprobs, entropies

    def _logprobs(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model.get_output_embeddings()(hidden).float()
        if softcap := getattr(self.model.config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / softcap) * softcap
        distribution = torch.log_softmax(logits / self.temperature, dim=-1)
        logprobs = distribution.gather(-1, targets[:, None]).squeeze(-1)
        with torch.no_grad():
            entropies = -(distribution.exp() * distribution).sum(-1)
        return logprobs, entropies


@contextmanager
def process_group() -> Iterator[None]:
    """A default process group: that of torchrun, one that exists already, or one of this process alone."""
    if dist.is_initialized():
        yield
        return
    if dist.is_torchelastic_launched():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def local_device() -> torch.device:
    """The device of this rank."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def load_model(config: RunConfig, policy_directory: str) -> PolicyModel:
    """The policy with float32 master weights, sharded over all ranks. Raises ModelError for an unknown output head."""
    model = AutoModelForCausalLM.from_pretrained(
        policy_directory,
        dtype=torch.float32,
        attn_implementation=config.train.attention,
        trust_remote_code=config.model.trust_remote_code,
    )
    policy = PolicyModel(model, config.sampling.temperature)
    _check_head(policy)
    if config.train.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    device = local_device()
    policy.to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtype = getattr(torch, config.train.param_dtype)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    return policy


@torch.no_grad()
def _check_head(policy: PolicyModel) -> None:
    """Some architectures scale their logits in ways of their own; training them as if they did not would be wrong."""
    model = policy.model
    tokens = torch.arange(4) % model.config.get_text_config().vocab_size
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
    expected = torch.log_softmax(logits / policy.temperature, -1).gather(-1, tokens[1:, None]).squeeze(-1)
    hidden = model.get_decoder()(input_ids=tokens[None], use_cache=False).last_hidden_state[0, :-1]
    if not torch.allclose(policy._logprobs(hidden, tokens[1:])[0], expected, atol=1e-4):
        raise ModelError(
            f"{type(model).__name__} computes its logits in a way the trainer does not know, so its log-probs would be "
            "wrong; use another model"
        )

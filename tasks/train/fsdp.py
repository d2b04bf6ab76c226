"""The trained model: any Hugging Face causal LM under FSDP2, asked only for log-probs of response tokens."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from tasks.config import ConfigError, RunConfig
from tasks.memory import LOGIT_CHUNK
from tasks.train.batching import MicroBatch


class ModelError(RuntimeError):
    """The model cannot be trained as it is; the message says why."""


class PolicyModel(nn.Module):
    """A causal LM that maps a micro-batch to log-probs and entropies of its response tokens.

    Logits are computed only at positions that predict a response token, and `LOGIT_CHUNK` of them at a time, recomputed
    in the backward pass: memory grows neither with the prompt nor with vocabulary × length.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, entropy_gradient: bool = False) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.entropy_gradient = entropy_gradient

    def forward(self, batch: MicroBatch, *, whole: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """logprobs [T] float32 of `batch.targets` and entropies [T] (nats), at the sampling temperature.

        `whole`: through the architecture's own forward pass, which makes all logits at once (to compare with).
        """
        if whole:
            logits = self.model(input_ids=batch.tokens, use_cache=False).logits
            return self._of_targets(logits.flatten(0, 1)[batch.predicting], batch.targets)
        hidden = self.model.get_decoder()(input_ids=batch.tokens, use_cache=False).last_hidden_state
        hidden = hidden.flatten(0, 1)[batch.predicting]
        parts = [
            checkpoint(self._logprobs, chunk, targets, use_reentrant=False)
            for chunk, targets in zip(hidden.split(LOGIT_CHUNK), batch.targets.split(LOGIT_CHUNK), strict=True)
        ]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _logprobs(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model.get_output_embeddings()(hidden).float()
        if softcap := getattr(self.model.config.get_text_config(), "final_logit_softcapping", None):
            logits = torch.tanh(logits / softcap) * softcap
        return self._of_targets(logits, targets)

    def _of_targets(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(logits, targets, self.temperature, entropy_gradient=self.entropy_gradient)


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of `targets` [T] and entropies [T], in nats, under softmax(logits / temperature); logits [T, V].

    Computed in float32. The entropies carry a gradient only if it is asked for: it costs memory.
    """
    distribution = torch.log_softmax(logits.float() / temperature, dim=-1)
    logprobs = distribution.gather(-1, targets[:, None]).squeeze(-1)
    if entropy_gradient:  # as −p·log p, whose gradient is finite also where p is 0
        return logprobs, -(distribution.exp() * distribution.clamp(min=-1e4)).sum(-1)
    return logprobs, torch.special.entr(distribution.detach().exp()).sum(-1)


@contextmanager
def process_group(stall_seconds: float = 1800.0) -> Iterator[None]:
    """A default process group: one that exists already, that of torchrun, or one of this process alone.

    A rank that waits longer than `stall_seconds` for another fails.
    """
    if dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend, timeout=timedelta(seconds=stall_seconds))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def local_device() -> torch.device:
    """The device of this rank."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def load_model(config: RunConfig, policy_directory: str) -> PolicyModel:
    """The policy with master weights of `train.master_dtype`, sharded over all ranks, without dropout.

    Raises ModelError if the weight files lack tensors, or if the architecture has an output head of an unknown kind.
    """
    logging.disable_progress_bar()  # the stage draws its own
    model, loaded = AutoModelForCausalLM.from_pretrained(
        policy_directory,
        dtype=getattr(torch, config.train.master_dtype),
        attn_implementation=config.train.attention,
        trust_remote_code=config.model.trust_remote_code,
        output_loading_info=True,
    )
    if lacking := sorted(loaded["missing_keys"]):
        raise ModelError(
            f"{policy_directory}: its weight files lack {', '.join(lacking[:5])} ({len(lacking)} tensors of "
            f"{type(model).__name__}); use a complete model"
        )
    model.eval()  # dropout would make a token's log-prob differ between two passes over the same weights
    device = local_device()
    if config.train.fused_kernels:
        _fuse_kernels(model, device)
    policy = PolicyModel(model, config.sampling.temperature, config.objective.entropy_coefficient > 0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtype = getattr(torch, config.train.param_dtype)
    shard = functools.partial(
        fully_shard,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
        reshard_after_forward=True,
    )
    if config.train.compile:
        _let_compile()
    for layer in _layers(model):
        if config.train.activation_checkpointing:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        if config.train.compile:
            layer.compile(dynamic=True)  # no two micro-batches are of one length
        shard(layer)
    shard(policy)
    policy.to(device)  # buffers; parameters are there already
    _check_head(policy, config)
    return policy


def _fuse_kernels(model: PreTrainedModel, device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError("train.fused_kernels: true needs a GPU; set it to false")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError as error:
        raise ConfigError(f"train.fused_kernels: true needs the extra `liger` ({error})") from error
    _apply_liger_kernel_to_instance(model=model)


def _let_compile() -> None:
    """An engine in this process has turned torch.compile off for itself, where `engine.enforce_eager` is set."""
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    torch._dynamo.config.disable = False


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, which every Hugging Face model names by their class."""
    names = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in names]


@torch.no_grad()
def _check_head(policy: PolicyModel, config: RunConfig) -> None:
    """Some architectures scale their logits in ways of their own; training them as if they did not would be wrong."""
    tokens = torch.arange(8, device=local_device()) % policy.model.config.get_text_config().vocab_size
    none = tokens[:0]
    probe = MicroBatch(tokens[None], torch.arange(7, device=tokens.device), tokens[1:], none, none, none, none, none)
    exact = config.train.param_dtype == config.train.master_dtype == "float32"
    tolerance = 1e-4 if exact else 0.25
    if not torch.allclose(policy(probe)[0], policy(probe, whole=True)[0], rtol=0.0, atol=tolerance):
        raise ModelError(
            f"{type(policy.model).__name__} makes its logits in a way the trainer does not know, so its log-probs "
            "would be wrong; use another model"
        )

"""A whole train stage: read the batch, update the policy, write it. Runs on every rank alike."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tasks.carry_over.shards import read_shards
from tasks.config import RunConfig
from tasks.policy import read_policy
from tasks.report.progress import stage_progress
from tasks.train.batching import Packed, micro_batches, mini_batches, pack
from tasks.train.checkpoint import load_optimizer, save_optimizer, save_policy
from tasks.train.fsdp import PolicyModel, load_model, local_device, process_group
from tasks.train.objective import dapo_loss
from tasks.trajectory import TrainingRow


class LogprobMismatchError(RuntimeError):
    """Engine and trainer disagree on the log-probs of tokens that the current weights sampled."""


@dataclasses.dataclass(frozen=True)
class Directories:
    """Where a train stage reads and writes. `optimizer`: None before the first update of a run."""

    policy: str
    optimizer: str | None
    batch: str
    new_policy: str
    new_optimizer: str


@dataclasses.dataclass(frozen=True)
class Share:
    """One rank's part of a mini-batch. `token_count`: trained tokens of the whole mini-batch, on all ranks."""

    micro_batches: list[Packed]
    proximal_logprobs: list[torch.Tensor]
    token_count: int


def train_policy(config: RunConfig, directories: Directories) -> dict[str, float]:
    """One iteration of DAPO on the batch; writes the next policy and its optimizer, returns metrics over all ranks.

    Called on every rank of a torchrun job, or alone. Raises ShardError, PolicyError, OptimizerError, ModelError or
    LogprobMismatchError, all before the first update.
    """
    began = time.monotonic()
    rows = list(read_shards(directories.batch))
    incoming = read_policy(directories.policy, verify=True)
    with process_group():
        model = load_model(config, directories.policy)
        optimizer = torch.optim.AdamW(model.parameters())
        updates = 0
        if directories.optimizer is not None:
            updates = load_optimizer(model, optimizer, directories.optimizer, incoming.fingerprint)
        for group in optimizer.param_groups:
            group.update(betas=config.train.adam_betas, weight_decay=config.train.weight_decay)
        shares = [_share_of(model, batch, config) for batch in mini_batches(rows, config.train.mini_batch_responses)]
        metrics = _engine_difference(shares, incoming.version)
        limit = config.objective.max_logprob_difference
        if limit is not None and metrics["logprob_difference_fresh"] > limit:
            raise LogprobMismatchError(
                f"engine and trainer differ by {metrics['logprob_difference_fresh']:.3g} nats per token on tokens of "
                f"the current weights, more than objective.max_logprob_difference = {limit}; compare engine.dtype with "
                "train.param_dtype, and sampling.temperature on both sides"
            )
        measured = []
        with stage_progress("train", len(shares)) as progress:
            for number, share in enumerate(shares):
                if share.token_count:
                    for group in optimizer.param_groups:
                        group["lr"] = learning_rate(config, updates)
                    measured.append(_update(model, optimizer, share, config))
                    updates += 1
                if dist.get_rank() == 0:
                    progress(number + 1, f"update {number + 1} of {len(shares)}")
        fingerprint = save_policy(model, directories.policy, directories.new_policy, incoming.version + 1)
        save_optimizer(model, optimizer, directories.new_optimizer, fingerprint, updates)
    metrics |= (
        {name: sum(update[name] for update in measured) / len(measured) for name in measured[0]} if measured else {}
    )
    metrics |= {"updates": float(len(measured)), "seconds": time.monotonic() - began}
    for name in ("skipped_updates", "nonfinite_tokens"):
        metrics[name] = sum(update[name] for update in measured)
    return {f"train/{name}": float(value) for name, value in metrics.items()}


def learning_rate(config: RunConfig, updates: int) -> float:
    """Learning rate of the update after `updates` others: linear warm-up to the peak, then constant."""
    if updates >= config.warmup_updates:
        return config.train.learning_rate
    return config.train.learning_rate * (updates + 1) / config.warmup_updates


@torch.no_grad()
def _share_of(model: PolicyModel, batch: Sequence[TrainingRow], config: RunConfig) -> Share:
    """This rank's micro-batches with their log-probs under the incoming policy, before any update."""
    loads = micro_batches(batch, config.train.micro_batch_tokens, dist.get_world_size())
    packs = [pack(rows, local_device()) for rows in loads[dist.get_rank()]]
    proximal = [model(packed)[0] for packed in packs]
    usable = [
        packed.loss_mask & torch.isfinite(logprobs) & torch.isfinite(packed.behaviour_logprobs)
        for packed, logprobs in zip(packs, proximal, strict=True)
    ]
    count = int(_sum_over_ranks({"tokens": sum(mask.sum() for mask in usable)})["tokens"])
    return Share(packs, proximal, count)


def _engine_difference(shares: Sequence[Share], version: int) -> dict[str, float]:
    """Mean |engine − trainer| log-prob of trained tokens, of the current weights and of older ones apart."""
    sums = {"fresh": 0.0, "fresh_tokens": 0.0, "stale": 0.0, "stale_tokens": 0.0}
    for share in shares:
        for packed, proximal in zip(share.micro_batches, share.proximal_logprobs, strict=True):
            difference = (proximal - packed.behaviour_logprobs).abs().double()
            counted = packed.loss_mask & torch.isfinite(difference)
            for kind, mask in (("fresh", packed.versions == version), ("stale", packed.versions < version)):
                sums[kind] += difference[counted & mask].sum()
                sums[f"{kind}_tokens"] += (counted & mask).sum()
    total = _sum_over_ranks(sums)
    return {f"logprob_difference_{kind}": total[kind] / max(total[f"{kind}_tokens"], 1) for kind in ("fresh", "stale")}


def _update(model: PolicyModel, optimizer: torch.optim.Optimizer, share: Share, config: RunConfig) -> dict[str, float]:
    """One optimizer update on a mini-batch, or none if its gradient is not finite."""
    objective = config.objective
    sums: dict[str, torch.Tensor] = {}
    last = len(share.micro_batches) - 1
    for number, (packed, proximal) in enumerate(zip(share.micro_batches, share.proximal_logprobs, strict=True)):
        model.set_requires_gradient_sync(number == last)
        logprobs, entropies = model(packed)
        loss, metrics = dapo_loss(
            logprobs,
            packed.behaviour_logprobs if objective.correction == "behaviour" else proximal,
            packed.behaviour_logprobs,
            packed.advantages,
            packed.loss_mask,
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
            dual_clip=objective.dual_clip,
            tis_cap=objective.tis_cap if objective.correction == "decoupled" else None,
            token_count=share.token_count,
        )
        (loss * dist.get_world_size()).backward()  # FSDP averages gradients over the ranks; the sum is wanted
        metrics["loss"] = loss.detach()
        metrics["entropy"] = torch.where(packed.loss_mask, entropies, 0.0).nansum() / share.token_count
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_gradient_norm)
    norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    finite = torch.isfinite(torch.tensor(norm)).item()
    if finite:
        optimizer.step()
    optimizer.zero_grad()
    total = _sum_over_ranks(sums)
    weight = total.pop("importance_weight")
    squared = total.pop("squared_importance_weight")
    return total | {
        "importance_weight": weight,
        "effective_sample_share": weight**2 / squared if squared else 0.0,
        "gradient_norm": norm,
        "skipped_updates": float(not finite),
        "learning_rate": optimizer.param_groups[0]["lr"],
    }


def _sum_over_ranks(values: dict[str, float | torch.Tensor]) -> dict[str, float]:
    total = torch.tensor([float(value) for value in values.values()], dtype=torch.float64, device=local_device())
    dist.all_reduce(total)
    return dict(zip(values, total.tolist(), strict=True))

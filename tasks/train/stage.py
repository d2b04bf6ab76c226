"""A whole train stage: read the batch, update the policy, write it. Runs on every rank alike."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tasks.carry_over.shards import read_shards
from tasks.config import ObjectiveConfig, RunConfig
from tasks.policy import read_policy
from tasks.report.progress import say, stage_progress
from tasks.storage import fetch_model
from tasks.train.batching import MicroBatch, collate, micro_batches, mini_batches
from tasks.train.checkpoint import load_optimizer, new_optimizer, save_optimizer, save_policy
from tasks.train.fsdp import PolicyModel, load_model, local_device, process_group
from tasks.train.objective import dapo_loss, gspo_loss, reference_kl
from tasks.train.progress import TrainProgress, load_progress, save_progress
from tasks.trajectory import TrainingRow
from tasks.watchdog import watchdog


class TrainResult(NamedTuple):
    """`metrics`: of the stage, means over updates where there are several; `updates`: of each update, in order."""

    metrics: dict[str, float]
    updates: list[dict[str, float]]


class LogprobMismatchError(RuntimeError):
    """Engine and trainer disagree on the log-probs of tokens that the current weights sampled."""


@dataclasses.dataclass(frozen=True)
class Directories:
    """Where a train stage reads and writes. `optimizer`: None before the first update of a run; `progress`: what is
    saved between updates, at a local path or fsspec URL."""

    policy: str
    optimizer: str | None
    batch: str
    new_policy: str
    new_optimizer: str
    progress: str


@dataclasses.dataclass(frozen=True)
class Share:
    """One rank's part of a mini-batch. `token_count`, `response_count`: tokens to train on, and responses that have
    some, in the whole mini-batch, on all ranks."""

    micro_batches: list[MicroBatch]
    proximal_logprobs: list[torch.Tensor]
    reference_logprobs: list[torch.Tensor]  # of no tokens, where the objective has no KL term
    token_count: int
    response_count: int

    def on_device(self) -> Iterator[tuple[MicroBatch, torch.Tensor, torch.Tensor]]:
        """Each micro-batch with proximal and reference log-probs; between uses they lie in the host's memory."""
        device = local_device()
        parts = zip(self.micro_batches, self.proximal_logprobs, self.reference_logprobs, strict=True)
        for batch, proximal, reference in parts:
            yield batch.to(device), proximal.to(device), reference.to(device)


def train_policy(config: RunConfig, directories: Directories) -> TrainResult:
    """One iteration of DAPO on the batch; writes the next policy and its optimizer. Metrics are over all ranks.

    Called on every rank of a torchrun job, or alone; the process is left as it was. Without anything to train on the
    next policy has the weights of this one. Raises ShardError, PolicyError, OptimizerError, ModelError or
    LogprobMismatchError, all before the first update.
    """
    began = time.monotonic()
    with (
        process_group(config.stall_seconds),
        torch._dynamo.config.patch(disable=not config.train.compile),
        watchdog("train", config.stall_seconds) as beat,
    ):
        shards = read_shards(directories.batch)
        rows = list(shards)
        incoming = read_policy(directories.policy, verify=dist.get_rank() == 0)
        batches = [
            [collate(group) for group in _mine(batch, config)]
            for batch in mini_batches(rows, config.train.mini_batch_responses)
        ]
        reference = _reference_logprobs(batches, config)
        model = load_model(config, directories.policy)
        optimizer = new_optimizer(model, config)
        updates = 0
        if directories.optimizer is not None:
            updates = load_optimizer(model, optimizer, directories.optimizer, incoming.fingerprint)
        shares = []
        for part, reference_logprobs in zip(batches, reference, strict=True):
            shares.append(_share_of(model, part, reference_logprobs))
            beat()
        metrics = _age(rows, incoming.version) | _engine_difference(shares, incoming.version)
        limit = config.objective.max_logprob_difference
        if limit is not None and metrics.get("logprob_difference_fresh", 0.0) > limit:
            raise LogprobMismatchError(
                f"engine and trainer differ by {metrics['logprob_difference_fresh']:.3g} nats per token on tokens of "
                f"the current weights, more than objective.max_logprob_difference = {limit}; compare engine.dtype with "
                "train.param_dtype, and sampling.temperature on both sides"
            )
        started = TrainProgress(shards.manifest.digest, incoming.fingerprint, updates=updates)
        progress = load_progress(model, optimizer, directories.progress, started)
        leads = dist.get_rank() == 0
        saved = time.monotonic()
        with stage_progress("train", len(shares)) if leads else nullcontext() as show:
            for number in range(progress.done, len(shares)):
                if shares[number].token_count:
                    update = _update(model, optimizer, shares[number], config, learning_rate(config, progress.updates))
                    if math.isfinite(update["gradient_norm"]):
                        progress.measured.append(update)
                        progress.updates += 1
                    else:
                        progress.skipped += 1
                    if leads and not math.isfinite(update["gradient_norm"]):
                        say(f"train: update {number + 1} is skipped, its gradient norm is {update['gradient_norm']}")
                    if leads:
                        show(number + 1, f"update {number + 1} of {len(shares)}, loss {update['loss']:.4f}")
                progress.done = number + 1
                beat()
                if progress.done < len(shares) and _agreed(time.monotonic() - saved >= config.train.save_seconds):
                    save_progress(model, optimizer, directories.progress, progress)
                    saved = time.monotonic()
        fingerprint = save_policy(model, directories.policy, directories.new_policy, incoming.version + 1)
        save_optimizer(model, optimizer, directories.new_optimizer, fingerprint, progress.updates)
    measured = progress.measured
    del model, optimizer
    gc.collect()  # FSDP's hooks refer to each other in circles, which would keep the weights in memory
    for name in measured[0] if measured else ():
        metrics[name] = float(np.mean([update[name] for update in measured]))
    metrics |= {
        "updates": len(measured),
        "skipped_updates": progress.skipped,
        "nonfinite_tokens": sum(update["nonfinite_tokens"] for update in measured),
        "seconds": time.monotonic() - began,
    }
    return TrainResult({f"train/{name}": float(value) for name, value in metrics.items()}, measured)


def _agreed(wish: bool) -> bool:
    """Rank 0's wish, which every rank follows."""
    return _sum_over_ranks({"wish": float(wish and dist.get_rank() == 0)})["wish"] > 0


def learning_rate(config: RunConfig, updates: int) -> float:
    """Learning rate of the update after `updates` others: linear warm-up to the peak, then as `train.schedule` says.

    A falling schedule ends at `final_learning_rate` with the last update of the last iteration.
    """
    peak, final, warm_up = config.train.learning_rate, config.train.final_learning_rate, config.warmup_updates
    if updates < warm_up:
        return peak * (updates + 1) / warm_up
    if config.train.schedule == "constant":
        return peak
    falling = max(1, config.iterations * config.updates_per_iteration - warm_up)
    progress = min(1.0, (updates - warm_up + 1) / falling)
    if config.train.schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return peak + progress * (final - peak)


def _mine(rows: Sequence[TrainingRow], config: RunConfig) -> list[list[TrainingRow]]:
    """The rows of this rank's micro-batches."""
    return micro_batches(rows, config.train.micro_batch_tokens, dist.get_world_size())[dist.get_rank()]


@torch.no_grad()
def _logprobs(model: PolicyModel, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
    return [model(batch.to(local_device()))[0].cpu() for batch in batches]


def _reference_logprobs(batches: Sequence[Sequence[MicroBatch]], config: RunConfig) -> list[list[torch.Tensor]]:
    """Log-probs under `model.path`, which is loaded for them and let go; of no tokens without a KL term."""
    if not config.objective.kl_coefficient:
        return [[torch.empty(0) for _ in part] for part in batches]
    reference = load_model(config, fetch_model(config.model.path, config.model.revision))
    logprobs = [_logprobs(reference, part) for part in batches]
    del reference
    gc.collect()
    return logprobs


def _share_of(model: PolicyModel, batches: list[MicroBatch], reference: list[torch.Tensor]) -> Share:
    """This rank's micro-batches with their log-probs under the incoming policy, before any update."""
    proximal = _logprobs(model, batches)
    usable = [
        batch.loss_mask & torch.isfinite(logprobs) & torch.isfinite(batch.behaviour_logprobs)
        for batch, logprobs in zip(batches, proximal, strict=True)
    ]
    responses = [len(batch.rows[mask].unique()) for batch, mask in zip(batches, usable, strict=True)]
    counts = _sum_over_ranks({"tokens": sum(mask.sum() for mask in usable), "responses": sum(responses)})
    return Share(batches, proximal, reference, int(counts["tokens"]), int(counts["responses"]))


def _age(rows: Sequence[TrainingRow], version: int) -> dict[str, float]:
    """How much of the batch is trained on, and how old that is in weight versions."""
    lags = [version - row.versions()[row.masked_tokens :] for row in rows]
    trained = np.concatenate([np.empty(0, np.int32), *lags])
    return {
        "trained_tokens": len(trained),
        "masked_tokens": sum(row.tokens for row in rows) - len(trained),
        "off_policy_share": float(np.mean(trained > 0)) if len(trained) else 0.0,
        "mean_version_lag": float(np.mean(trained)) if len(trained) else 0.0,
    }


def _engine_difference(shares: Sequence[Share], version: int) -> dict[str, float]:
    """Mean |engine − trainer| log-prob of trained tokens, of the current weights and of older ones, where there are."""
    kinds = ("fresh", "stale")
    sums = dict.fromkeys((*kinds, *(f"{kind}_tokens" for kind in kinds)), 0.0)
    for share in shares:
        for batch, proximal in zip(share.micro_batches, share.proximal_logprobs, strict=True):
            difference = (proximal - batch.behaviour_logprobs).abs().double()
            counted = batch.loss_mask & torch.isfinite(difference)
            for kind, mask in (("fresh", batch.versions == version), ("stale", batch.versions < version)):
                sums[kind] += difference[counted & mask].sum()
                sums[f"{kind}_tokens"] += (counted & mask).sum()
    total = _sum_over_ranks(sums)
    return {
        f"logprob_difference_{kind}": total[kind] / total[f"{kind}_tokens"] for kind in kinds if total[f"{kind}_tokens"]
    }


def _update(
    model: PolicyModel, optimizer: torch.optim.AdamW, share: Share, config: RunConfig, rate: float
) -> dict[str, float]:
    """One optimizer update on a mini-batch, or none if its gradient is not finite."""
    objective = config.objective
    sums: dict[str, torch.Tensor] = {}
    for batch, proximal, reference in share.on_device():
        logprobs, entropies = model(batch)
        loss, metrics = _policy_loss(logprobs, proximal, batch, share, objective)
        entropy = torch.where(batch.loss_mask & torch.isfinite(entropies), entropies, 0.0).sum() / share.token_count
        metrics["entropy"] = entropy.detach()
        if objective.entropy_coefficient:
            loss = loss - objective.entropy_coefficient * entropy
        if objective.kl_coefficient:
            divergence = reference_kl(logprobs, reference, batch.loss_mask, share.token_count)
            metrics["reference_kl"] = divergence.detach()
            loss = loss + objective.kl_coefficient * divergence
        (loss * dist.get_world_size()).backward()  # FSDP averages gradients over the ranks; the sum is wanted
        metrics["loss"] = loss.detach()
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_gradient_norm)
    norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if math.isfinite(norm):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    optimizer.zero_grad()
    total = _sum_over_ranks(sums)
    squared = total.pop("squared_importance_weight")
    return total | {
        "effective_sample_share": total["importance_weight"] ** 2 / squared if squared else 0.0,
        "gradient_norm": norm,
        "learning_rate": rate,
    }


def _policy_loss(
    logprobs: torch.Tensor, proximal: torch.Tensor, batch: MicroBatch, share: Share, objective: ObjectiveConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    clips = {"clip_low": objective.clip_low, "clip_high": objective.clip_high}
    if objective.ratio == "sequence":
        return gspo_loss(
            logprobs,
            proximal,
            batch.advantages,
            batch.loss_mask,
            batch.rows,
            response_count=share.response_count,
            **clips,
        )
    return dapo_loss(
        logprobs,
        batch.behaviour_logprobs if objective.correction == "behaviour" else proximal,
        batch.behaviour_logprobs,
        batch.advantages,
        batch.loss_mask,
        dual_clip=objective.dual_clip,
        tis_cap=objective.tis_cap if objective.correction == "decoupled" else None,
        token_count=share.token_count,
        **clips,
    )


def _sum_over_ranks(values: dict[str, float | torch.Tensor]) -> dict[str, float]:
    total = torch.tensor([float(value) for value in values.values()], dtype=torch.float64, device=local_device())
    dist.all_reduce(total)
    return dict(zip(values, total.tolist(), strict=True))

"""A whole carry-over stage on local directories: read the rollouts, sort them, balance the books, write the results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tasks.carry_over.filter import CarriedOver, FilterRules, carry_over
from tasks.carry_over.ledger import Account, Ledger
from tasks.carry_over.shards import Manifest, read_shards, write_shards
from tasks.config import RunConfig
from tasks.trajectory import BATCH_SCHEMA, Status, Trajectory, group_by_id

# What became of a response and what it was, without its tokens: small enough to be kept for every iteration.
RESPONSE_SCHEMA = pa.schema(
    [
        ("iteration", pa.int32()),
        ("outcome", pa.string()),  # trained, filtered, failed or discarded
        ("group_id", pa.string()),
        ("member", pa.int32()),
        ("data_source", pa.string()),
        ("tokens", pa.int32()),
        ("finish_reason", pa.string()),
        ("accuracy", pa.float32()),
        ("reward", pa.float32()),
        ("resumes", pa.int32()),
        ("lag", pa.int32()),  # of its oldest token, in weight versions
        ("created_iteration", pa.int32()),
    ]
)


class ScoreErrorRateError(RuntimeError):
    """Too many scores failed; the message names examples."""


class NoProgressError(RuntimeError):
    """No group taught anything for too many iterations in a row; the message says what was seen."""


class CarryOverResult(NamedTuple):
    """`responses`: a row of RESPONSE_SCHEMA for each response that this iteration let go, trained on or not."""

    metrics: dict[str, float]
    responses: pa.Table


def carry_over_rollouts(
    config: RunConfig, iteration: int, rollouts_directory: str, batch_directory: str, carry_directory: str
) -> CarryOverResult:
    """Write the training batch of this iteration and the trajectories for the next one.

    Raises LedgerError, ConflictError, ScoreErrorRateError or NoProgressError. The rollouts are left as they are.
    """
    began = time.monotonic()
    shards = read_shards(rollouts_directory)
    rows = list(shards)
    facts = shards.manifest.extra
    _check_scores(rows, facts["score_errors"], config.reward.max_error_rate)
    result = carry_over(
        rows,
        FilterRules(
            group_size=config.train.group_size,
            batch_groups=config.train.batch_groups,
            version=facts["version"],
            max_version_lag=config.partial_rollout.max_version_lag,
            on_stale=config.partial_rollout.on_stale,
            unfinished=config.partial_rollout.unfinished,
            strict=not config.partial_rollout.enabled,
            overlong_filter=config.objective.overlong_filter,
            scale_advantages=config.objective.scale_advantages,
        ),
    )
    before = Ledger.from_json(facts["carried"]["ledger"]) if facts["carried"] else Ledger()
    quarantined = [*facts["quarantined"], *(vars(row) for row in shards.quarantined)]
    ledger = _ledger(result, before, shards.manifest, rows, quarantined)
    ledger.check()
    total = before + ledger
    total.check()
    rounds = 0 if result.batch else facts["carried"].get("rounds_without_progress", 0) + 1
    write_shards(
        result.batch, batch_directory, extra={"iteration": iteration, "version": facts["version"]}, schema=BATCH_SCHEMA
    )
    write_shards(
        result.carried,
        carry_directory,
        cursor=shards.manifest.cursor,
        fingerprints=shards.manifest.fingerprints,
        extra={"iteration": iteration, "ledger": total.to_json(), "rounds_without_progress": rounds},
    )
    metrics = _metrics(result, ledger, facts["version"])
    if rounds >= config.partial_rollout.max_rounds_without_progress:
        raise NoProgressError(
            f"{rounds} iterations in a row had no informative group: of {metrics['carry/scored_groups']:.0f} groups "
            f"scored in the last one {metrics['carry/all_right_groups']:.0f} were all right, "
            f"{metrics['carry/all_wrong_groups']:.0f} all wrong and {ledger.groups.failed} failed; since the start "
            f"{total.groups.trained} groups were trained. Use easier or harder prompts, more members per group "
            "(train.group_size), or raise partial_rollout.max_rounds_without_progress"
        )
    metrics |= {"carry/seconds": time.monotonic() - began, "carry/quarantined_rows": float(len(quarantined))}
    return CarryOverResult(metrics, _responses(result, iteration, facts["version"]))


def _check_scores(rows: Sequence[Trajectory], examples: Sequence[str], max_error_rate: float) -> None:
    scored = [row for row in rows if row.score_status is not None]
    failed = sum(row.status == Status.FAILED for row in scored)
    if failed > max_error_rate * len(scored):
        raise ScoreErrorRateError(
            f"{failed} of {len(scored)} scores failed, more than reward.max_error_rate = {max_error_rate}: "
            f"{'; '.join(examples)}"
        )


def _ledger(
    result: CarriedOver,
    before: Ledger,
    manifest: Manifest,
    rows: Sequence[Trajectory],
    quarantined: Sequence[dict[str, Any]],
) -> Ledger:
    """This iteration's books: what entered as counted at the prompts and the engine, what left as sorted here."""

    def groups(part: Sequence[Trajectory]) -> int:
        return len(group_by_id(part))

    def tokens(part: Sequence[Trajectory]) -> int:
        return sum(row.tokens for row in part)

    unreadable = {row["group_id"] for row in quarantined} - set(group_by_id(rows))
    return Ledger(
        groups=Account(
            carried_in=before.groups.carried_out,
            entered=manifest.extra["drawn_groups"],
            trained=groups(result.batch),
            filtered=groups(result.filtered),
            failed=groups(result.failed) + len(unreadable),
            discarded=groups(result.discarded),
            carried_out=groups(result.carried),
        ),
        tokens=Account(
            carried_in=before.tokens.carried_out,
            entered=manifest.extra["generated_tokens"],
            trained=result.trained_tokens,
            masked=result.masked_tokens,
            filtered=tokens(result.filtered),
            failed=tokens(result.failed) + sum(row["tokens"] for row in quarantined),
            discarded=result.lost_tokens + tokens(result.discarded),
            carried_out=tokens(result.carried),
        ),
    )


def _metrics(result: CarriedOver, ledger: Ledger, version: int) -> dict[str, float]:
    batch, ready = result.batch, [*result.batch, *result.filtered]
    filtered = [members[0].accuracy for members in group_by_id(result.filtered).values()]
    ages = version - np.concatenate([row.versions() for row in batch]) if batch else np.zeros(0)
    trained = sum(row.tokens for row in batch)
    accounts = {
        f"ledger/{kind}_{name}": float(value)
        for kind, account in (("groups", ledger.groups), ("tokens", ledger.tokens))
        for name, value in vars(account).items()
    }
    return accounts | {
        "carry/reward": _mean([row.reward for row in ready]),
        "carry/accuracy": _mean([row.accuracy for row in ready]),
        "carry/response_tokens": _mean([row.tokens for row in ready]),
        "carry/truncated_share": _mean([row.truncated for row in ready]),
        "carry/trained_accuracy": _mean([row.accuracy for row in batch]),
        "carry/trained_response_tokens": _mean([row.tokens for row in batch]),
        "carry/ready_groups": float(len(group_by_id(batch)) + result.surplus_groups),
        "carry/scored_groups": float(len(group_by_id(ready)) + result.surplus_groups),
        "carry/all_right_groups": float(sum(accuracy == 1.0 for accuracy in filtered)),
        "carry/all_wrong_groups": float(sum(accuracy == 0.0 for accuracy in filtered)),
        "carry/surplus_groups": float(result.surplus_groups),
        "carry/restarted_trajectories": float(result.restarted),
        "carry/off_policy_share": float(np.mean(ages > 0)) if trained else 0.0,
        "carry/resumed_share": sum(row.tokens for row in batch if row.resumes) / trained if trained else 0.0,
        "carry/mean_version_lag": float(np.mean(ages)) if trained else 0.0,
        "carry/max_version_lag": float(np.max(ages)) if trained else 0.0,
    }


def _responses(result: CarriedOver, iteration: int, version: int) -> pa.Table:
    outcomes = (
        ("trained", result.batch),
        ("filtered", result.filtered),
        ("failed", result.failed),
        ("discarded", result.discarded),
    )
    rows = [
        {name: getattr(row, name, None) for name in RESPONSE_SCHEMA.names}
        | {"iteration": iteration, "outcome": outcome, "lag": version - row.oldest_version}
        for outcome, part in outcomes
        for row in part
        if row.tokens
    ]
    return pa.Table.from_pylist(rows, RESPONSE_SCHEMA)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")

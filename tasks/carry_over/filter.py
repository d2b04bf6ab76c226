"""What of an iteration's trajectories is trained on now, what is carried on, and what is let go.

A group is ready when all its members are scored, and informative when their accuracies differ: DAPO's dynamic sampling
(arXiv:2503.14476, eq. 11), judged on raw accuracy, never on the shaped reward. Pure: the same rows, the same result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tasks.carry_over.advantage import group_advantages
from tasks.trajectory import Status, TrainingRow, Trajectory, group_by_id


class ConflictError(RuntimeError):
    """Two deliveries of one member contradict each other; the message names both."""


class MixedVersionsError(RuntimeError):
    """A batch of a strict (partial rollout off) run mixes weight versions; the message names the row."""


@dataclass(frozen=True)
class FilterRules:
    """version: of the weights trained now, which sampled this iteration's new tokens."""

    group_size: int
    batch_groups: int
    version: int
    max_version_lag: int
    on_stale: Literal["mask", "reroll"] = "mask"
    unfinished: Literal["carry", "discard"] = "carry"
    strict: bool = False
    overlong_filter: bool = False
    scale_advantages: bool = True


@dataclass(frozen=True)
class CarriedOver:
    """Every row that came in is in exactly one of these lists, or was merged away.

    batch: whole groups, oldest first, each row with its advantage. carried: oldest group first; restarted members have
    lost the tokens counted in `lost_tokens`, together with those of superseded attempts.
    """

    batch: list[TrainingRow] = field(default_factory=list)
    filtered: list[Trajectory] = field(default_factory=list)
    failed: list[Trajectory] = field(default_factory=list)
    carried: list[Trajectory] = field(default_factory=list)
    discarded: list[Trajectory] = field(default_factory=list)
    restarted: int = 0
    lost_tokens: int = 0
    surplus_groups: int = 0  # ready and informative, but more than the batch holds

    @property
    def trained_tokens(self) -> int:
        return sum(row.tokens - row.masked_tokens for row in self.batch)

    @property
    def masked_tokens(self) -> int:
        return sum(row.masked_tokens for row in self.batch)


def carry_over(rows: Iterable[Trajectory], rules: FilterRules) -> CarriedOver:
    """Sort an iteration's trajectories. `rows` have their oldest group first, as the scheduler leaves them.

    Raises ConflictError on contradicting deliveries, and MixedVersionsError in strict mode.
    """
    merged, superseded = merge_deliveries(rows)
    chosen: list[list[Trajectory]] = []
    kept: list[list[Trajectory]] = []
    filtered: list[Trajectory] = []
    failed: list[Trajectory] = []
    surplus = 0
    for members in sorted(group_by_id(merged).values(), key=lambda group: min(row.created_iteration for row in group)):
        if len(members) != rules.group_size or any(row.status == Status.FAILED for row in members):
            failed.extend(members)
        elif any(row.status != Status.SCORED for row in members):
            kept.append(members)
        elif len({row.accuracy for row in members}) == 1:
            filtered.extend(members)
        elif len(chosen) < rules.batch_groups:
            chosen.append(members)
        else:
            surplus += 1
            kept.append(members)
    batch = _training_rows([row for members in chosen for row in members], rules)
    next_version = rules.version + bool(batch)
    left = [row for members in kept for row in members]
    discarded, left = (left, []) if rules.unfinished == "discard" else ([], left)
    carried, restarted, lost = _restart_stale(left, next_version, rules)
    if rules.strict:
        _refuse_mixed_versions(batch, rules.version)
    return CarriedOver(
        batch=batch,
        filtered=filtered,
        failed=failed,
        carried=carried,
        discarded=discarded,
        restarted=restarted,
        lost_tokens=superseded + lost,
        surplus_groups=surplus,
    )


def merge_deliveries(rows: Iterable[Trajectory]) -> tuple[list[Trajectory], int]:
    """One row per (group, member), and the tokens of superseded attempts.

    The same trajectory delivered twice is one; of two cuts of one trajectory the later, which continues the earlier,
    stays; a later attempt supersedes an earlier one, whose tokens are discarded. Raises ConflictError otherwise.
    """
    merged: dict[tuple[str, int], Trajectory] = {}
    discarded = 0
    for row in rows:
        other = merged.get(row.key)
        if other is None:
            merged[row.key] = row
        elif row.attempt != other.attempt:
            older, newer = sorted((row, other), key=lambda delivery: delivery.attempt)
            merged[row.key] = newer
            discarded += older.tokens
        else:
            merged[row.key] = _later_cut(other, row)
    return list(merged.values()), discarded


_PROGRESS = [Status.PENDING, Status.PARTIAL, Status.FINISHED, Status.FAILED, Status.SCORED]


def _later_cut(one: Trajectory, other: Trajectory) -> Trajectory:
    earlier, later = sorted((one, other), key=lambda row: (row.tokens, _PROGRESS.index(row.status)))
    length = earlier.tokens
    continues = (
        np.array_equal(earlier.response_tokens, later.response_tokens[:length])
        and np.array_equal(earlier.logprobs, later.logprobs[:length])
        and np.array_equal(earlier.versions(), later.versions()[:length])
        and np.array_equal(earlier.prompt_tokens, later.prompt_tokens)
        and (earlier.status in (Status.PENDING, Status.PARTIAL) or earlier.tokens == later.tokens)
        and (earlier.status != Status.SCORED or earlier == later)
    )
    if not continues:
        raise ConflictError(
            f"group {one.group_id} member {one.member} attempt {one.attempt} was delivered twice with different "
            f"content: {_describe(one)} and {_describe(other)}"
        )
    return later


def _describe(row: Trajectory) -> str:
    return f"[{row.status}, {row.tokens} tokens, segments {[tuple(s) for s in row.segments]}, accuracy {row.accuracy}]"


def stale_tokens(row: Trajectory, version: int, max_version_lag: int) -> int:
    """How many leading tokens were sampled more than `max_version_lag` versions before `version`."""
    return int(np.count_nonzero(version - row.versions() > max_version_lag))


def _training_rows(rows: Sequence[Trajectory], rules: FilterRules) -> list[TrainingRow]:
    group_ids = [row.group_id for row in rows]
    advantages = group_advantages([row.reward for row in rows], group_ids, scale=rules.scale_advantages)
    return [
        TrainingRow(
            **vars(row),
            advantage=float(np.float32(advantage)),
            masked_tokens=row.tokens
            if rules.overlong_filter and row.truncated
            else stale_tokens(row, rules.version, rules.max_version_lag),
        )
        for row, advantage in zip(rows, advantages, strict=True)
    ]


def _restart_stale(
    rows: Sequence[Trajectory], next_version: int, rules: FilterRules
) -> tuple[list[Trajectory], int, int]:
    """Carried rows; in reroll mode those that would be too old at the next training version start anew, alone."""
    if rules.on_stale == "mask":
        return list(rows), 0, 0
    stale = [row for row in rows if stale_tokens(row, next_version, rules.max_version_lag)]
    keys = {row.key for row in stale}
    carried = [row.restarted() if row.key in keys else row for row in rows]
    return carried, len(stale), sum(row.tokens for row in stale)


def _refuse_mixed_versions(batch: Sequence[TrainingRow], version: int) -> None:
    for row in batch:
        if any(segment.version != version for segment in row.segments):
            raise MixedVersionsError(
                f"partial_rollout.enabled is false, but group {row.group_id} member {row.member} has tokens of "
                f"versions {[segment.version for segment in row.segments]} in a batch of version {version}"
            )

"""Rows for the tests of carry-over, said in few words."""

from __future__ import annotations

import dataclasses

from tasks.trajectory import FinishReason, ScoreStatus, Status, Trajectory, extend


def row(group="g", member=0, *, segments=(), accuracy=None, reward=None, status=None, iteration=0, **changes):
    """A trajectory with (length, version) segments; scored if it has an accuracy, else partial or pending."""
    trajectory = Trajectory(group, member, group, "test", "", [1, 2], iteration)
    start = 0
    for length, version in segments:
        trajectory = extend(trajectory, range(start, start + length), [-0.5] * length, version)
        start += length
    if accuracy is not None or status in (Status.FINISHED, Status.FAILED):
        trajectory = dataclasses.replace(
            trajectory,
            status=Status.SCORED if status is None else status,
            finish_reason=changes.pop("finish_reason", FinishReason.STOP),
            finished_iteration=iteration,
            accuracy=accuracy,
            reward=(2.0 * accuracy - 1.0 if reward is None else reward) if accuracy is not None else None,
            score_status={Status.FINISHED: None, Status.FAILED: ScoreStatus.ERROR}.get(status, ScoreStatus.OK),
        )
    elif status is not None:
        trajectory = dataclasses.replace(trajectory, status=status)
    return dataclasses.replace(trajectory, **changes)


def group(name, accuracies, *, segments=((4, 0),), iteration=0, rewards=None):
    """A scored group, one member per accuracy."""
    rewards = rewards or [None] * len(accuracies)
    return [
        row(name, member, segments=segments, accuracy=accuracy, reward=reward, iteration=iteration)
        for member, (accuracy, reward) in enumerate(zip(accuracies, rewards, strict=True))
    ]

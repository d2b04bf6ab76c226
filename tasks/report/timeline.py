"""What was in the engine when, for the pictures of a generate stage. Pure: the loop says what happens and when."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Literal

from tasks.trajectory import Segment, Trajectory


@dataclass(frozen=True)
class Stay:
    """One trajectory's time in the engine, in one of its slots; seconds since the stage began to sample."""

    slot: int
    group_id: str
    member: int
    entered: float
    left: float
    sampled: int  # tokens sampled meanwhile
    segments: tuple[Segment, ...]  # of the whole response as it left, those of earlier iterations included
    end: Literal["stop", "length", "cut"]

    @property
    def kept(self) -> int:
        """Tokens it came with, sampled in earlier iterations."""
        return sum(segment.length for segment in self.segments) - self.sampled


@dataclass
class Timeline:
    """Every stay of a stage, in the order in which they ended. A trajectory takes the lowest slot that is free."""

    stays: list[Stay] = field(default_factory=list)
    slots: int = 0
    _free: list[int] = field(default_factory=list)
    _open: dict[tuple[str, int], tuple[int, int, float]] = field(default_factory=dict)  # slot, tokens kept, entered

    def enter(self, row: Trajectory, seconds: float) -> None:
        if not self._free:
            heapq.heappush(self._free, self.slots)
            self.slots += 1
        self._open[row.key] = (heapq.heappop(self._free), row.tokens, seconds)

    def leave(self, row: Trajectory, seconds: float) -> None:
        """`row` as it is after its stay; does nothing if it is not in the engine."""
        if row.key not in self._open:
            return
        slot, kept, entered = self._open.pop(row.key)
        heapq.heappush(self._free, slot)
        self.stays.append(
            Stay(
                slot=slot,
                group_id=row.group_id,
                member=row.member,
                entered=entered,
                left=seconds,
                sampled=row.tokens - kept,
                segments=row.segments,
                end="cut" if row.finish_reason is None else row.finish_reason.value,
            )
        )

    def in_flight(self) -> list[tuple[float, int]]:
        """(seconds, trajectories in the engine) after each change."""
        changes = [(stay.entered, 1) for stay in self.stays] + [(stay.left, -1) for stay in self.stays]
        curve: list[tuple[float, int]] = []
        level = 0
        for seconds, change in sorted(changes):
            level += change
            curve.append((seconds, level))
        return curve

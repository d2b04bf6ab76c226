"""Who runs next, and when to stop. Pure: no engine, no clock and no file in it.

The scheduler owns every trajectory of a generate stage. A loop (`rollout.py`) asks it what to admit, tells it what the
engine delivered and what the scorers said, and asks whether a stop rule has fired.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tasks.trajectory import FinishReason, Status, Trajectory, extend, group_by_id

Key = tuple[str, int]  # (group_id, member)


@dataclass(frozen=True)
class StopRules:
    """The stage is cut when any of these is reached; None never fires."""

    ready_groups: int
    max_tokens: int | None = None
    max_seconds: float | None = None
    max_engine_steps: int | None = None
    max_scored_groups: int | None = None  # informative or not: ends a stage whose prompts teach nothing


@dataclass
class Counters:
    """What a stage has counted so far, those before a retry included."""

    sampled_tokens: int = 0
    reprefilled_tokens: int = 0  # prompt and kept tokens of the resumed ones, computed once more
    engine_steps: int = 0
    seconds: float = 0.0  # of sampling


@dataclass
class Running:
    """A trajectory in the engine, with what this iteration has sampled of it so far."""

    trajectory: Trajectory
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Scheduler:
    """Keeps `max_in_flight` trajectories in the engine, the oldest weights first, until a stop rule fires.

    carried: trajectories of earlier iterations, in any state.
    draw: makes the members (all `pending`) of the next new group; with `wait_for_all` it is asked only as far as the
        batch still needs groups, and every drawn group runs to its end (strict mode).
    version: of the weights the engine holds; every token of this iteration gets it.
    counted: by an earlier attempt at this iteration, whose trajectories are `carried`.
    """

    def __init__(
        self,
        carried: Iterable[Trajectory],
        draw: Callable[[], list[Trajectory]],
        *,
        rules: StopRules,
        max_in_flight: int,
        max_response_tokens: int,
        version: int,
        iteration: int,
        wait_for_all: bool = False,
        counted: Counters | None = None,
    ) -> None:
        self.rules = rules
        self.max_in_flight = max_in_flight
        self.max_response_tokens = max_response_tokens
        self.version = version
        self.iteration = iteration
        self.wait_for_all = wait_for_all
        self.counted = counted or Counters()
        self._draw = draw
        self._running: dict[Key, Running] = {}
        self._waiting: deque[Trajectory] = deque()
        self._ended: dict[Key, Trajectory] = {}
        self._unscored: deque[Key] = deque()
        self._undecided: dict[str, list[Key]] = {}
        self._order: dict[str, int] = {}  # groups by age: as they were carried, then as they were drawn
        self._scored_groups = 0
        self._informative_groups = 0
        self.scored = 0  # responses scored in this stage, those that failed included
        self._file(carried)

    def _file(self, carried: Iterable[Trajectory]) -> None:
        """Sort carried trajectories into waiting and ended ones; those out of budget end here, without the engine."""
        rows = list(carried)
        for members in group_by_id(rows).values():
            self._enter(members)
        resumable = []
        for row in rows:
            if row.status in (Status.PENDING, Status.PARTIAL) and row.tokens >= self.max_response_tokens:
                row = extend(row, [], [], self.version, FinishReason.LENGTH, self.iteration)
            if row.status in (Status.PENDING, Status.PARTIAL):
                resumable.append(row)
            else:
                self._end(row)
        resumable.sort(key=_oldest_weights_first)
        self._waiting.extend(resumable)

    def _enter(self, members: list[Trajectory]) -> None:
        group_id = members[0].group_id
        self._order[group_id] = len(self._order)
        self._undecided[group_id] = [row.key for row in members]

    @property
    def in_flight(self) -> int:
        return len(self._running)

    @property
    def scored_groups(self) -> int:
        """Groups of which every member is scored, those that failed included."""
        return self._scored_groups

    @property
    def informative_groups(self) -> int:
        """Scored groups whose members differ in accuracy (DAPO's dynamic sampling, arXiv:2503.14476 eq. 11)."""
        return self._informative_groups

    def admit(self) -> list[Trajectory]:
        """The trajectories to give to the engine now, so that `max_in_flight` are decoding."""
        admitted = []
        while len(self._running) < self.max_in_flight and (self._waiting or self._draw_group()):
            row = self._waiting.popleft()
            self._running[row.key] = Running(row)
            self.counted.reprefilled_tokens += len(row.prompt_tokens) + row.tokens if row.tokens else 0
            admitted.append(row)
        return admitted

    def _draw_group(self) -> bool:
        if self.wait_for_all:
            # Whatever is launched is waited for, so launch only what the batch may still need.
            wanted = self.rules.ready_groups - self._informative_groups - len(self._undecided)
            if wanted <= 0 or self._limit_reached(seconds=None):
                return False
        members = self._draw()
        self._enter(members)
        self._waiting.extend(members)
        return True

    def receive(
        self, key: Key, tokens: list[int], logprobs: list[float], finish_reason: FinishReason | None
    ) -> Trajectory | None:
        """Take what the engine sampled for one trajectory; returns the trajectory if that ended it."""
        running = self._running[key]
        running.tokens.extend(tokens)
        running.logprobs.extend(logprobs)
        self.counted.sampled_tokens += len(tokens)
        if finish_reason is None:
            return None
        del self._running[key]
        ended = self._with_samples(running, finish_reason)
        self._end(ended)
        return ended

    def _with_samples(self, running: Running, finish_reason: FinishReason | None) -> Trajectory:
        row = running.trajectory
        if row.tokens and running.tokens:
            row = dataclasses.replace(row, resumes=row.resumes + 1)
        return extend(row, running.tokens, running.logprobs, self.version, finish_reason, self.iteration)

    def _end(self, row: Trajectory) -> None:
        self._ended[row.key] = row
        if row.status == Status.FINISHED:
            self._unscored.append(row.key)
        else:
            self._decide(row.group_id)

    def take_unscored(self) -> list[Trajectory]:
        """Ended trajectories that have not been handed out for scoring yet."""
        rows = [self._ended[key] for key in self._unscored]
        self._unscored.clear()
        return rows

    def score(self, row: Trajectory) -> None:
        """Replace an ended trajectory by its scored (or failed) form."""
        self._ended[row.key] = row
        self.scored += 1
        self._decide(row.group_id)

    def _decide(self, group_id: str) -> None:
        keys = self._undecided.get(group_id)
        if keys is None:
            return
        if any(key not in self._ended or self._ended[key].status == Status.FINISHED for key in keys):
            return
        del self._undecided[group_id]
        members = [self._ended[key] for key in keys]
        self._scored_groups += 1
        if all(row.status == Status.SCORED for row in members):
            self._informative_groups += len({row.accuracy for row in members}) > 1

    def stop_reason(self, seconds: float) -> str | None:
        """Which stop rule has fired after `seconds` of sampling, or None to go on."""
        if self._informative_groups >= self.rules.ready_groups:
            reason = f"{self._informative_groups} informative groups are ready"
        else:
            reason = self._limit_reached(seconds)
        if self.wait_for_all and (self._running or self._waiting or self._undecided):
            return None
        return reason

    def _limit_reached(self, seconds: float | None) -> str | None:
        rules = self.rules
        if rules.max_tokens is not None and self.counted.sampled_tokens >= rules.max_tokens:
            return f"{self.counted.sampled_tokens} tokens are sampled"
        if rules.max_engine_steps is not None and self.counted.engine_steps >= rules.max_engine_steps:
            return f"{self.counted.engine_steps} engine steps are done"
        if rules.max_scored_groups is not None and self._scored_groups >= rules.max_scored_groups:
            return f"{self._scored_groups} groups are scored, but only {self._informative_groups} are informative"
        if rules.max_seconds is not None and seconds is not None and seconds >= rules.max_seconds:
            return f"{seconds:.0f} seconds have passed"
        return None

    def snapshot(self) -> list[Trajectory]:
        """Every trajectory as it stands; the stage goes on."""
        running = [self._with_samples(running, None) for running in self._running.values()]
        rows = [*self._ended.values(), *running, *self._waiting]
        return sorted(rows, key=lambda row: (self._order[row.group_id], row.member))

    def cut(self) -> list[Trajectory]:
        """Every trajectory as it stands, after the engine has let go of all of them."""
        rows = self.snapshot()
        self._running.clear()
        return rows


def _oldest_weights_first(row: Trajectory) -> tuple[float, int, str, int]:
    oldest = float("inf") if row.oldest_version is None else row.oldest_version
    return oldest, row.created_iteration, row.group_id, row.member

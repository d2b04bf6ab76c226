"""What a generate stage saves while it samples, so that nothing but the last seconds is ever sampled twice.

    <run>/flush/0007/    every trajectory of iteration 7 as it stood at the last flush, as shards

Every `flush_seconds`, and when the process is asked to end (SIGTERM, SIGINT) or the stage fails. A stage that starts
again goes on from there: same prompts, same tokens, same books. Written in the background while the engine goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from tasks.carry_over.shards import Manifest, ShardError, Shards, read_shards, write_shards
from tasks.faults import PreemptedError
from tasks.generate.scheduler import Counters, Scheduler
from tasks.policy import Policy
from tasks.report.progress import say
from tasks.trajectory import Status, Trajectory


@dataclass(frozen=True)
class Origin:
    """What an iteration's sampling started from. Trajectories of another origin are never continued."""

    iteration: int
    version: int
    policy: str  # fingerprint of the weights
    carry: str  # digest of the carry's manifest

    @classmethod
    def of(cls, iteration: int, policy: Policy, carry: Manifest) -> Origin:
        return cls(iteration, policy.version, policy.fingerprint, carry.digest)


def read_if_from(directory: str, origin: Origin) -> Shards | None:
    """Trajectories of this very origin in `directory`; None if there are none, or damaged ones, which is said."""
    try:
        shards = read_shards(directory)
        if shards.manifest.extra.get("origin") != asdict(origin):
            return None
        for _ in shards:  # every checksum and invariant, before anything is built on it
            pass
    except (ShardError, OSError) as error:
        if not str(error).startswith(f"{directory}/manifest.json: missing"):
            say(f"what an earlier attempt saved is not used: {error}")
        return None
    return None if shards.quarantined else shards


def continued(shards: Shards) -> list[Trajectory]:
    """The rows to go on with: those whose score had failed are scored anew, for the scorer may have been mended."""
    return [
        dataclasses.replace(row, status=Status.FINISHED, score_status=None) if row.status == Status.FAILED else row
        for row in shards
    ]


class Snapshot(NamedTuple):
    """A stage as it stood at a time, `at` (seconds since the epoch)."""

    rows: list[Trajectory]
    cursor: int
    counted: Counters
    at: float


class Flusher:
    """Saves a running stage. Use as a context manager around the sampling loop; call `update` after each step."""

    def __init__(
        self, directory: str, seconds: float, origin: Origin, cursor: Callable[[], int], fingerprints: Mapping[str, str]
    ) -> None:
        self._directory = directory
        self._interval = seconds
        self._origin = origin
        self._cursor = cursor
        self._fingerprints = fingerprints
        self._last = time.monotonic()
        self._writer: threading.Thread | None = None
        self._newest: tuple[Scheduler, float] | None = None
        self._asked: int | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Flusher:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handlers[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, _frame: object) -> None:
        """Only remembered here: the handler may run in the middle of a change to the scheduler's books."""
        if self._asked is not None:
            signal.default_int_handler(number, None)  # asked twice: at once
        self._asked = number

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if isinstance(error, Exception) and not isinstance(error, PreemptedError) and self._newest is not None:
            with contextlib.suppress(ValueError):  # it failed amid a change to the books: the last flush stands
                self._save_all()
        if self._writer is not None:
            self._writer.join()

    def update(self, scheduler: Scheduler, seconds: float) -> None:
        """Flush if it is time. Raises PreemptedError or KeyboardInterrupt if the process was asked to end."""
        self._newest = (scheduler, seconds)
        if self._asked is not None:
            self._save_all()
            if self._asked == signal.SIGINT:
                raise KeyboardInterrupt
            raise PreemptedError(
                f"asked to end; {scheduler.counted.sampled_tokens:,} tokens are saved in {self._directory}"
            )
        busy = self._writer is not None and self._writer.is_alive()
        if not busy and time.monotonic() - self._last >= self._interval:
            self._last = time.monotonic()
            self._writer = threading.Thread(
                target=self._write, args=(self._snapshot(scheduler, seconds),), name="flush"
            )
            self._writer.start()

    def _save_all(self) -> None:
        if self._writer is not None:
            self._writer.join()
        self._write(self._snapshot(*self._newest))

    def _snapshot(self, scheduler: Scheduler, seconds: float) -> Snapshot:
        counted = dataclasses.replace(scheduler.counted, seconds=seconds)
        return Snapshot(scheduler.snapshot(), self._cursor(), counted, time.time())

    def _write(self, snapshot: Snapshot) -> None:
        try:
            write_shards(
                snapshot.rows,
                self._directory,
                cursor=snapshot.cursor,
                fingerprints=self._fingerprints,
                extra={"origin": asdict(self._origin), "counted": asdict(snapshot.counted), "at": snapshot.at},
            )
        except Exception as error:  # the engine goes on: a flush that fails costs safety, not results
            say(f"generate: could not save to {self._directory}, sampling goes on: {error}")

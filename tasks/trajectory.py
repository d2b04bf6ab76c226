"""What a trajectory is: one response being sampled for one prompt, its Arrow schema and its invariants.

Everything that crosses a stage border is a sequence of these rows. A `Trajectory` never changes; sampling more of it
makes a new one (`extend`), so that tokens, behaviour log-probs and weight versions cannot fall out of step.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

SCHEMA = pa.schema(
    [
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("member", pa.int32(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("data_source", pa.string(), nullable=False),
        pa.field("ground_truth", pa.string(), nullable=False),
        pa.field("prompt_tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("response_tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field(
            "segments",
            pa.list_(pa.struct([("start", pa.int32()), ("length", pa.int32()), ("version", pa.int32())])),
            nullable=False,
        ),
        pa.field("status", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string()),
        pa.field("resumes", pa.int32(), nullable=False),
        pa.field("accuracy", pa.float32()),
        pa.field("reward", pa.float32()),
        pa.field("score_status", pa.string()),
        pa.field("created_iteration", pa.int32(), nullable=False),
        pa.field("finished_iteration", pa.int32()),
    ]
)

# What carry_over hands to train: trajectories of whole groups, each with its advantage.
BATCH_SCHEMA = pa.schema(
    [
        *SCHEMA,
        pa.field("advantage", pa.float32(), nullable=False),
        pa.field("masked_tokens", pa.int32(), nullable=False),
    ]
)


class Status(enum.StrEnum):
    PENDING = "pending"  # drawn, no token sampled yet
    PARTIAL = "partial"  # some tokens sampled, not ended
    FINISHED = "finished"  # ended, not scored yet
    SCORED = "scored"  # ended and scored
    FAILED = "failed"  # cannot be trained on: its score failed


class FinishReason(enum.StrEnum):
    STOP = "stop"  # the policy ended the response
    LENGTH = "length"  # the response budget ran out (truncated)


class ScoreStatus(enum.StrEnum):
    OK = "ok"
    UNPARSED = "unparsed"  # no answer could be read from the response
    TIMEOUT = "timeout"
    ERROR = "error"


class Segment(NamedTuple):
    """`length` tokens of the response from position `start`, all sampled by the weights `version`."""

    start: int
    length: int
    version: int


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One row. Arrays are int32 / float32; `logprobs` are of the sampled tokens under the distribution sampled from."""

    group_id: str
    member: int
    prompt_id: str
    data_source: str
    ground_truth: str
    prompt_tokens: np.ndarray  # [P] int32
    created_iteration: int
    attempt: int = 0
    response_tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))  # [T] int32
    logprobs: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.float32))  # [T] float32
    segments: tuple[Segment, ...] = ()
    status: Status = Status.PENDING
    finish_reason: FinishReason | None = None
    resumes: int = 0
    accuracy: float | None = None
    reward: float | None = None
    score_status: ScoreStatus | None = None
    finished_iteration: int | None = None

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the way frozen dataclasses normalise their fields
        set_field(self, "prompt_tokens", np.asarray(self.prompt_tokens, np.int32))
        set_field(self, "response_tokens", np.asarray(self.response_tokens, np.int32))
        set_field(self, "logprobs", np.asarray(self.logprobs, np.float32))
        set_field(self, "segments", tuple(Segment(*segment) for segment in self.segments))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(
            np.array_equal(mine, theirs, equal_nan=mine.dtype.kind == "f")
            if isinstance(mine, np.ndarray)
            else mine == theirs
            for mine, theirs in ((getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))
        )

    __hash__ = None

    @property
    def key(self) -> tuple[str, int]:
        return self.group_id, self.member

    @property
    def tokens(self) -> int:
        """Response length in tokens."""
        return len(self.response_tokens)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == FinishReason.LENGTH

    @property
    def oldest_version(self) -> int | None:
        """Version that sampled the first token; None before the first token."""
        return self.segments[0].version if self.segments else None

    def versions(self) -> np.ndarray:
        """[T] int32: the weight version that sampled each token."""
        versions = [segment.version for segment in self.segments]
        return np.repeat(np.asarray(versions, np.int32), [segment.length for segment in self.segments])

    def restarted(self) -> Trajectory:
        """The same member with nothing sampled, as its next attempt."""
        return Trajectory(
            group_id=self.group_id,
            member=self.member,
            prompt_id=self.prompt_id,
            data_source=self.data_source,
            ground_truth=self.ground_truth,
            prompt_tokens=self.prompt_tokens,
            created_iteration=self.created_iteration,
            attempt=self.attempt + 1,
        )


@dataclass(frozen=True, eq=False)
class TrainingRow(Trajectory):
    """A scored trajectory of a training batch, a row of BATCH_SCHEMA.

    Versions never decrease along a response, so the tokens too old to train on are always its first ones:
    `masked_tokens` of them are left out of the loss (all of them, for a response that is left out whole).
    """

    advantage: float = 0.0
    masked_tokens: int = 0


def extend(
    trajectory: Trajectory,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    version: int,
    finish_reason: FinishReason | None = None,
    iteration: int | None = None,
) -> Trajectory:
    """The trajectory with `tokens` appended, all sampled by the weights `version`.

    Without tokens and without a finish reason it is returned as it is: a cut before the first token leaves no trace.
    `iteration` is recorded as the one it finished in, and is required with a finish reason.
    Raises ValueError if the trajectory had ended, or if tokens and log-probs differ in number.
    """
    if trajectory.status not in (Status.PENDING, Status.PARTIAL):
        raise ValueError(f"{trajectory.key}: cannot extend a trajectory that is {trajectory.status}")
    if len(tokens) != len(logprobs):
        raise ValueError(f"{trajectory.key}: {len(tokens)} tokens but {len(logprobs)} log-probs")
    if finish_reason is not None and iteration is None:
        raise ValueError(f"{trajectory.key}: a finished trajectory needs the iteration it finished in")
    if not tokens and finish_reason is None:
        return trajectory
    segments = trajectory.segments
    if tokens:
        last = segments[-1] if segments else None
        if last is not None and last.version == version:
            segments = (*segments[:-1], last._replace(length=last.length + len(tokens)))
        else:
            segments = (*segments, Segment(trajectory.tokens, len(tokens), version))
    return dataclasses.replace(
        trajectory,
        response_tokens=np.concatenate([trajectory.response_tokens, np.asarray(tokens, np.int32)]),
        logprobs=np.concatenate([trajectory.logprobs, np.asarray(logprobs, np.float32)]),
        segments=segments,
        status=Status.PARTIAL if finish_reason is None else Status.FINISHED,
        finish_reason=finish_reason,
        finished_iteration=None if finish_reason is None else iteration,
    )


_STATUSES, _FINISH_REASONS, _SCORE_STATUSES = frozenset(Status), frozenset(FinishReason), frozenset(ScoreStatus)


def violations(trajectory: Trajectory) -> list[str]:
    """The invariants a row breaks, each in words; empty for a good row."""
    row, broken = trajectory, []
    length = row.tokens
    ended = row.status in (Status.FINISHED, Status.SCORED, Status.FAILED)
    starts = list(itertools.accumulate((segment.length for segment in row.segments), initial=0))
    versions = [segment.version for segment in row.segments]
    if row.status not in _STATUSES:
        broken.append(f"status {row.status!r} is none of {', '.join(Status)}")
    if row.finish_reason is not None and row.finish_reason not in _FINISH_REASONS:
        broken.append(f"finish_reason {row.finish_reason!r} is none of {', '.join(FinishReason)}")
    if row.score_status is not None and row.score_status not in _SCORE_STATUSES:
        broken.append(f"score_status {row.score_status!r} is none of {', '.join(ScoreStatus)}")
    if min(row.member, row.attempt, row.resumes, row.created_iteration) < 0:
        broken.append("member, attempt, resumes and created_iteration must not be negative")
    if len(row.logprobs) != length:
        broken.append(f"{length} response tokens but {len(row.logprobs)} log-probs")
    if starts[-1] != length:
        broken.append(f"segments cover {starts[-1]} of {length} response tokens")
    if any(segment.length <= 0 for segment in row.segments):
        broken.append("a segment is empty or negative")
    if any(segment.start != start for segment, start in zip(row.segments, starts, strict=False)):
        broken.append("segments are not contiguous from 0")
    if any(later < earlier for earlier, later in itertools.pairwise(versions)):
        broken.append(f"segment versions decrease: {versions}")
    if row.status == Status.PENDING and (length or row.segments):
        broken.append("a pending trajectory has tokens or segments")
    if row.status == Status.PARTIAL and not length:
        broken.append("a partial trajectory has no tokens")
    if ended != (row.finish_reason is not None):
        broken.append(f"status {row.status} with finish_reason {row.finish_reason}")
    if ended != (row.finished_iteration is not None):
        broken.append(f"status {row.status} with finished_iteration {row.finished_iteration}")
    if not len(row.prompt_tokens):
        broken.append("the prompt is empty")
    if row.status == Status.SCORED and not (_finite(row.accuracy) and _finite(row.reward)):
        broken.append(f"scored with accuracy {row.accuracy} and reward {row.reward}")
    if row.status in (Status.SCORED, Status.FAILED) and row.score_status is None:
        broken.append(f"status {row.status} without score_status")
    return broken


def _finite(value: float | None) -> bool:
    return value is not None and bool(np.isfinite(value))


def to_record_batch(rows: Sequence[Trajectory], schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    """Rows as one Arrow record batch of `schema` (SCHEMA, or BATCH_SCHEMA for training rows)."""
    return pa.RecordBatch.from_arrays(
        [_column([getattr(row, field.name) for row in rows], field.type) for field in schema], schema=schema
    )


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if not pa.types.is_list(kind):
        return pa.array(values, type=kind)
    offsets = pa.array(np.cumsum([0, *map(len, values)], dtype=np.int32))
    if not pa.types.is_struct(kind.value_type):
        flat = pa.array(np.concatenate(values) if values else np.empty(0), type=kind.value_type)
        return pa.ListArray.from_arrays(offsets, flat)
    segments = np.array([segment for value in values for segment in value], np.int32).reshape(-1, len(Segment._fields))
    structs = pa.StructArray.from_arrays([pa.array(column) for column in segments.T], fields=list(kind.value_type))
    return pa.ListArray.from_arrays(offsets, structs, type=kind)


def from_record_batch(batch: pa.RecordBatch) -> Iterator[Trajectory]:
    """The rows of a record batch, unchecked (see `violations`): TrainingRow for BATCH_SCHEMA, else Trajectory."""
    training = "advantage" in batch.schema.names
    row_type, schema = (TrainingRow, BATCH_SCHEMA) if training else (Trajectory, SCHEMA)
    columns = {name: _values(batch.column(name)) for name in schema.names}
    for index in range(batch.num_rows):
        yield row_type(**{name: values[index] for name, values in columns.items()})


def from_mapping(row: Mapping[str, Any]) -> Trajectory:
    """A row given as a mapping of its columns, as Arrow's `to_pylist` makes them: segments may be mappings too."""
    segments = [Segment(**part) if isinstance(part, Mapping) else Segment(*part) for part in row.get("segments", ())]
    return Trajectory(**{**row, "segments": segments})


def _values(column: pa.Array) -> Sequence[Any]:
    kind = column.type
    if not pa.types.is_list(kind):
        return column.to_pylist()
    offsets = column.offsets.to_numpy()
    if pa.types.is_struct(kind.value_type):
        flat = list(zip(*(column.values.field(name).to_pylist() for name in Segment._fields), strict=True))
    else:
        flat = column.values.to_numpy(zero_copy_only=False)
    return [flat[start:end] for start, end in itertools.pairwise(offsets)]


def segment_texts(row: Trajectory, decode: Callable[[list[int]], str]) -> Iterator[tuple[Segment, str]]:
    """Each segment with its part of the response's text.

    Ever longer prefixes are decoded, since a cut may divide a character; it then belongs to the later segment.
    """
    tokens, before = row.response_tokens.tolist(), ""
    for segment in row.segments:
        end = segment.start + segment.length
        text = decode(tokens[:end])
        if end < len(tokens):
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        yield segment, text[len(before) :]
        before = text


def group_by_id(rows: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
    """Members of each group, in order of first appearance. Groups are joined by id, never by position."""
    groups: dict[str, list[Trajectory]] = {}
    for row in rows:
        groups.setdefault(row.group_id, []).append(row)
    return groups

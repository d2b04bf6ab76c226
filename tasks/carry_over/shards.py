"""A directory of trajectories on disk: `<hash>-00000.arrow`, … (Arrow IPC files) and `manifest.json`, written last.

The manifest names every file with its size and sha256. Locally each file is written to a temporary name, synced and
renamed; an object store shows an object only when it is complete. File names carry a hash of their content, so that
writing the same directory again never changes a file that a manifest names: a reader sees the old rows or the new ones,
never a mix.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import fsspec
import pyarrow as pa

from tasks.faults import named_faults
from tasks.trajectory import (
    BATCH_SCHEMA,
    SCHEMA,
    Trajectory,
    from_mapping,
    from_record_batch,
    to_record_batch,
    violations,
)

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
MAX_SHARD_TOKENS = 8_000_000
MAX_BATCH_TOKENS = 1_000_000
MAX_BATCH_ROWS = 8192


class ShardError(ValueError):
    """A directory of trajectories cannot be read; the message names the file and what to do."""


@dataclass(frozen=True)
class ShardFile:
    name: str
    rows: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Quarantined:
    """A row that breaks an invariant: it is named and counted, and goes no further."""

    file: str
    row: int
    group_id: str
    member: int
    tokens: int
    rule: str


@dataclass(frozen=True)
class Manifest:
    """`cursor`: draw number of the next prompt; `extra`: what the writing stage says of the rows."""

    rows: int
    tokens: int
    files: tuple[ShardFile, ...]
    cursor: int = 0
    fingerprints: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    quarantined: tuple[Quarantined, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def digest(self) -> str:
        """sha256 of everything it says: the same rows and facts, the same digest."""
        return _digest(asdict(self))


def write_shards(
    rows: Iterable[Trajectory | Mapping[str, Any]],
    directory: str,
    *,
    cursor: int = 0,
    fingerprints: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
    schema: pa.Schema = SCHEMA,
    max_shard_tokens: int = MAX_SHARD_TOKENS,
) -> Manifest:
    """Write rows (SCHEMA, or BATCH_SCHEMA for training rows) to a local directory or fsspec URL, all or nothing.

    Rows are taken one by one, so memory is bounded by `max_shard_tokens` (prompt and response). A row that breaks an
    invariant is put into the manifest's quarantine instead of a file.
    """
    filesystem, root = fsspec.core.url_to_fs(directory)
    if _is_local(filesystem):
        with named_faults(directory):
            filesystem.makedirs(root, exist_ok=True)
    files: list[ShardFile] = []
    quarantined: list[Quarantined] = []
    for number, chunk in enumerate(_chunks(_good_rows(rows, quarantined), max_shard_tokens)):
        content = _ipc_file(chunk, schema)
        digest = hashlib.sha256(content).hexdigest()
        name = f"{digest[:16]}-{number:05d}.arrow"
        _put(filesystem, f"{root}/{name}", content)
        files.append(ShardFile(name, len(chunk), sum(row.tokens for row in chunk), len(content), digest))
    manifest = Manifest(
        rows=sum(file.rows for file in files),
        tokens=sum(file.tokens for file in files),
        files=tuple(files),
        cursor=cursor,
        fingerprints=dict(fingerprints or {}),
        extra=dict(extra or {}),
        quarantined=tuple(quarantined),
    )
    content = asdict(manifest)
    _put(filesystem, f"{root}/{MANIFEST}", json.dumps({"sha256": _digest(content), **content}, indent=1).encode())
    kept = {file.name for file in files} | {MANIFEST}
    with named_faults(directory):
        for path in filesystem.ls(root, detail=False, refresh=True):
            if path.rsplit("/", 1)[-1] not in kept:
                filesystem.rm(path)
    return manifest


def _good_rows(rows: Iterable[Trajectory | Mapping[str, Any]], quarantined: list[Quarantined]) -> Iterator[Trajectory]:
    for number, row in enumerate(rows):
        row = row if isinstance(row, Trajectory) else from_mapping(row)
        if broken := violations(row):
            quarantined.append(
                Quarantined("(never written)", number, row.group_id, row.member, row.tokens, "; ".join(broken))
            )
        else:
            yield row


def _chunks(rows: Iterable[Trajectory], max_tokens: int) -> Iterator[list[Trajectory]]:
    """Runs of rows of at most `max_tokens` (a longer row stands alone)."""
    chunk: list[Trajectory] = []
    tokens = 0
    for row in rows:
        size = row.tokens + len(row.prompt_tokens)
        if chunk and (tokens + size > max_tokens or len(chunk) * 64 > max_tokens):
            yield chunk
            chunk, tokens = [], 0
        chunk.append(row)
        tokens += size
    if chunk:
        yield chunk


def _ipc_file(rows: list[Trajectory], schema: pa.Schema) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, schema) as writer:
        for part in _chunks(rows, MAX_BATCH_TOKENS):
            for start in range(0, len(part), MAX_BATCH_ROWS):
                writer.write_batch(to_record_batch(part[start : start + MAX_BATCH_ROWS], schema))
    return sink.getvalue()


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _is_local(filesystem: fsspec.AbstractFileSystem) -> bool:
    return "file" in filesystem.protocol


def _put(filesystem: fsspec.AbstractFileSystem, path: str, content: bytes) -> None:
    with named_faults(path):
        if not _is_local(filesystem):
            filesystem.pipe_file(path, content)
            return
        temporary = f"{path}.{os.getpid()}.tmp"
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            raise
        folder = os.open(os.path.dirname(path), os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


class Shards:
    """The rows of a directory. Iterating reads one file at a time and may be repeated.

    `quarantined`: the rows left out, those found while writing and those found by the last iteration.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory.rstrip("/")
        self._filesystem, self._root = fsspec.core.url_to_fs(directory)
        self.manifest = self._read_manifest()
        self.quarantined = list(self.manifest.quarantined)

    def __len__(self) -> int:
        return self.manifest.rows

    def __iter__(self) -> Iterator[Trajectory]:
        self.quarantined = list(self.manifest.quarantined)
        seen: set[tuple[str, int]] = set()
        for file in self.manifest.files:
            for number, row in enumerate(self._read_file(file)):
                broken = violations(row)
                if not broken and row.key in seen:
                    broken = [f"(group_id, member) = {row.key} stands twice in the directory"]
                if broken:
                    self.quarantined.append(
                        Quarantined(file.name, number, row.group_id, row.member, row.tokens, "; ".join(broken))
                    )
                else:
                    seen.add(row.key)
                    yield row

    def _read_manifest(self) -> Manifest:
        path = f"{self.directory}/{MANIFEST}"
        try:
            with named_faults(path):
                content = self._filesystem.cat_file(f"{self._root}/{MANIFEST}")
            content = json.loads(content)
        except FileNotFoundError:
            raise ShardError(f"{path}: missing, so the directory was never completely written; use another") from None
        except ValueError as error:
            raise ShardError(f"{path}: not JSON ({error}); the file is damaged, use another directory") from None
        try:
            recorded = content.pop("sha256")
            version = content["schema_version"]
            if version != SCHEMA_VERSION:
                raise ShardError(
                    f"{path}: schema version {version}, this code reads {SCHEMA_VERSION}; convert it first"
                )
            if recorded != _digest(content):
                raise ShardError(f"{path}: its content is not what it says; the file is damaged, use another directory")
            manifest = Manifest(
                **content
                | {
                    "files": tuple(ShardFile(**file) for file in content["files"]),
                    "quarantined": tuple(Quarantined(**row) for row in content["quarantined"]),
                }
            )
            for file in manifest.files:
                if os.path.basename(file.name) != file.name or file.name in ("", ".", ".."):
                    raise ShardError(
                        f"{path}: names {file.name!r}, which is not a file of this directory; do not use it"
                    )
        except (KeyError, TypeError, AttributeError) as error:
            raise ShardError(f"{path}: not a shard manifest ({error!r}); the file is damaged, use another") from None
        return manifest

    def _read_file(self, file: ShardFile) -> Iterator[Trajectory]:
        path = f"{self.directory}/{file.name}"
        try:
            with named_faults(path):
                content = self._filesystem.cat_file(f"{self._root}/{file.name}")
        except FileNotFoundError:
            raise ShardError(f"{path}: named by {MANIFEST} but missing; use another directory") from None
        if len(content) != file.bytes or hashlib.sha256(content).hexdigest() != file.sha256:
            raise ShardError(
                f"{path}: its content is not what {MANIFEST} says; the file is damaged, use another directory"
            )
        try:
            reader = pa.ipc.open_file(pa.BufferReader(content))
            if not (reader.schema.equals(SCHEMA) or reader.schema.equals(BATCH_SCHEMA)):
                raise ShardError(f"{path}: its columns are not those of a trajectory: {reader.schema.names}")
            for index in range(reader.num_record_batches):
                yield from from_record_batch(reader.get_batch(index))
        except (pa.ArrowInvalid, OSError) as error:
            raise ShardError(f"{path}: not an Arrow IPC file of trajectories: {error}") from error


def read_shards(directory: str) -> Shards:
    """Open a directory written by `write_shards`, at a local path or fsspec URL. Raises ShardError naming the file.

    Each file's checksum is verified before a row of it is handed out; rows that break an invariant are quarantined.
    """
    return Shards(directory)

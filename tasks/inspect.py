"""Print what a directory of trajectories holds: a carry, rollouts or batch of a run, at a local path or fsspec URL.

python -m tasks.inspect runs/sandbox/carry/0024
python -m tasks.inspect runs/sandbox/carry/0024 --trajectory p000761.0/3
python -m tasks.inspect s3://bucket/runs/sandbox/carry/0024
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.carry_over.shards import Manifest, ShardError, Shards, read_shards
from tasks.policy import MANIFEST
from tasks.prompt_files import DataError
from tasks.prompts import load_tokenizer
from tasks.trajectory import Trajectory, segment_texts

COLOURS = ("cyan", "yellow", "green", "magenta", "red", "blue")


@dataclass
class Census:
    """What is counted in one pass over the rows, so that memory does not grow with them."""

    rows: dict[str, int] = field(default_factory=dict)  # by status
    tokens: dict[str, int] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    resumes: dict[int, int] = field(default_factory=dict)
    oldest: dict[int, int] = field(default_factory=dict)  # rows by the version of their first token
    by_version: dict[int, int] = field(default_factory=dict)  # tokens by the version that sampled them
    groups: set[str] = field(default_factory=set)
    oldest_row: Trajectory | None = None

    @classmethod
    def of(cls, rows: Iterable[Trajectory]) -> Census:
        census = cls()
        for row in rows:
            census._count(row)
        return census

    def _count(self, row: Trajectory) -> None:
        _add(self.rows, str(row.status), 1)
        _add(self.tokens, str(row.status), row.tokens)
        _add(self.resumes, row.resumes, 1)
        self.lengths.append(row.tokens)
        self.groups.add(row.group_id)
        for segment in row.segments:
            _add(self.by_version, segment.version, segment.length)
        if row.oldest_version is not None:
            _add(self.oldest, row.oldest_version, 1)
            if self.oldest_row is None or _age(row) < _age(self.oldest_row):
                self.oldest_row = row


def _add(counts: dict, key: str | int, amount: int) -> None:
    counts[key] = counts.get(key, 0) + amount


def _age(row: Trajectory) -> tuple[int, int, int]:
    return row.oldest_version or 0, row.created_iteration, -row.tokens


def show_directory(shards: Shards, console: Console) -> None:
    """Counts by state, lag, lengths, the oldest trajectory, the ledger and what was put aside."""
    census, manifest = Census.of(shards), shards.manifest
    console.print(
        f"[bold]{shards.directory}[/]: {manifest.rows:,} trajectories of {len(census.groups):,} groups, "
        f"{manifest.tokens:,} response tokens in {len(manifest.files)} files; next prompt is draw {manifest.cursor:,}"
    )
    for name in ("iteration", "version", "stop_reason", "generated_tokens", "drawn_groups"):
        if name in manifest.extra:
            console.print(f"  {name.replace('_', ' ')}: {manifest.extra[name]}", highlight=False)
    states = _table("state", "trajectories", "tokens", title="By state")
    for status in sorted(census.rows):
        states.add_row(status, f"{census.rows[status]:,}", f"{census.tokens[status]:,}")
    console.print(states)
    if census.by_version:
        newest = max(manifest.extra.get("version", 0), *census.by_version)
        versions = _table(
            "weight version", "lag", "tokens", "trajectories that began with it", title="By weight version"
        )
        for version, tokens in sorted(census.by_version.items()):
            versions.add_row(str(version), str(newest - version), f"{tokens:,}", f"{census.oldest.get(version, 0):,}")
        console.print(versions)
        points = np.percentile(census.lengths, (0, 50, 90, 99, 100)).astype(int)
        named = zip(("least", "median", "90 %", "99 %", "greatest"), points, strict=True)
        console.print("response tokens: " + ", ".join(f"{name} {value:,}" for name, value in named), highlight=False)
        resumed = ", ".join(f"{count:,} × {times}" for times, count in sorted(census.resumes.items()))
        console.print(f"resumed (trajectories × times): {resumed}", highlight=False)
    if census.oldest_row is not None:
        row = census.oldest_row
        console.print(
            f"oldest: {row.group_id}/{row.member}, drawn in iteration {row.created_iteration}, {row.status}, "
            f"{_segments(row)}",
            highlight=False,
        )
    _show_ledger(manifest, console)
    for quarantined in shards.quarantined:
        console.print(
            f"[red]put aside[/]: {quarantined.file} row {quarantined.row}, "
            f"{quarantined.group_id}/{quarantined.member}, {quarantined.tokens} tokens: {quarantined.rule}",
            highlight=False,
        )


def _show_ledger(manifest: Manifest, console: Console) -> None:
    """The books since the start of the run: a carry has them itself, rollouts from the carry they came from."""
    books = manifest.extra.get("ledger") or manifest.extra.get("carried", {}).get("ledger")
    if not books:
        return
    ledger = _table("account", "groups", "tokens", title="Ledger since the start of the run")
    for account in books["groups"]:
        ledger.add_row(account.replace("_", " "), *(f"{books[kind][account]:,}" for kind in ("groups", "tokens")))
    console.print(ledger)


def show_trajectory(row: Trajectory, console: Console, policy: str | None) -> None:
    """Everything about one trajectory: its facts, its segments and its text, or its ids where there is no tokenizer."""
    console.print(f"[bold]{row.group_id}/{row.member}[/]", highlight=False)
    facts = ("status", "finish_reason", "attempt", "resumes", "accuracy", "reward", "score_status")
    facts += ("created_iteration", "finished_iteration", "prompt_id", "data_source", "ground_truth")
    for name in facts:
        console.print(f"  {name}: {getattr(row, name)}", highlight=False, markup=False)
    segments = _table("from", "tokens", "weight version", "mean log-prob", title="Segments")
    for start, length, version in row.segments:
        mean = float(np.mean(row.logprobs[start : start + length]))
        segments.add_row(str(start), str(length), str(version), f"{mean:.4f}")
    console.print(segments)
    decode = (lambda ids: "".join(f"{token} " for token in ids)) if policy is None else load_tokenizer(policy).decode
    text = Text(decode(row.prompt_tokens.tolist()), style="bold")
    for segment, part in segment_texts(row, decode):
        text.append(part, style=COLOURS[segment.version % len(COLOURS)])
    console.print(text)


def _segments(row: Trajectory) -> str:
    return " + ".join(f"{segment.length} tokens by version {segment.version}" for segment in row.segments)


def _table(*columns: str, title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def policy_beside(directory: str) -> str | None:
    """The newest policy of the run a directory belongs to, where that is on this machine."""
    found = sorted(Path(directory).absolute().parent.parent.glob(f"policy/*/{MANIFEST}"))
    return str(found[-1].parent) if found else None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tasks.inspect", description=__doc__.splitlines()[0])
    parser.add_argument("directory", help="a carry, rollouts or batch directory of a run, local or fsspec URL")
    parser.add_argument("--trajectory", metavar="GROUP/MEMBER", help="show this one with its segments and text")
    parser.add_argument("--policy", help="directory of the tokenizer; default: the newest policy of the same run")
    given = parser.parse_args(arguments)
    console = Console(soft_wrap=True)
    try:
        shards = read_shards(given.directory)
        if given.trajectory is None:
            show_directory(shards, console)
            return
        for row in shards:
            if f"{row.group_id}/{row.member}" == given.trajectory:
                show_trajectory(row, console, given.policy or policy_beside(given.directory))
                return
        raise ShardError(
            f"{given.directory}: has no trajectory {given.trajectory}; the form is GROUP/MEMBER, e.g. p000001.0/3"
        )
    except (ShardError, DataError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

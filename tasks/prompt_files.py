"""Rows of a set of prompts, whatever they are kept in: parquet, JSONL, or what Hugging Face `datasets` saved.

Every row becomes a `PromptRow`: verl's schema (`data_source`, `prompt`, `reward_model.ground_truth`, `extra_info`), or
other columns named by the recipe. Structures may be given as JSON text, as some published sets have them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.config import PromptSource
from tasks.faults import named_faults

FORMATS = (".parquet", ".jsonl", ".arrow")


class DataError(ValueError):
    """A data file cannot be trained on; the message names file, row and column."""


@dataclass(frozen=True)
class PromptRow:
    """`where`: file and row, counted from 0; `messages`: of a chat, each with role and content."""

    where: str
    messages: list[dict[str, Any]]
    data_source: str
    ground_truth: str
    extra_info: dict[str, Any]


def read_rows(source: PromptSource) -> Iterator[PromptRow]:
    """Every row of a set. Raises DataError naming the file, and the row (counted from 0) and column at fault."""
    for path in _files(source.path):
        for number, row in enumerate(_rows(path)):
            yield _prompt_row(f"{path}: row {number}", row, source)


def _files(path: str) -> list[str]:
    """The files of a set: the path itself, or those of a folder."""
    filesystem, root = fsspec.core.url_to_fs(path)
    with named_faults(path):
        if not filesystem.isdir(root):
            return [path]
        names = sorted(PurePosixPath(file).name for file in filesystem.ls(root, detail=False))
        if "dataset_dict.json" in names:
            splits = json.loads(filesystem.cat_file(f"{root}/dataset_dict.json"))["splits"]
            raise DataError(f"{path}: holds the splits {', '.join(splits)}; name one, e.g. {path}/{splits[0]}")
        if "state.json" in names:
            state = json.loads(filesystem.cat_file(f"{root}/state.json"))
            return [f"{path}/{file['filename']}" for file in state["_data_files"]]
    found = [f"{path}/{name}" for name in names if name.endswith(FORMATS)]
    if not found:
        raise DataError(
            f"{path}: the folder holds no {', '.join(FORMATS)} file, but {', '.join(names[:5]) or 'nothing'}"
        )
    return found


def _rows(path: str) -> Iterator[dict[str, Any]]:
    kind = PurePosixPath(path).suffix
    if kind not in FORMATS:
        raise DataError(f"{path}: cannot read {kind or 'a file without ending'}; give a .parquet or .jsonl file")
    try:
        with named_faults(path), fsspec.open(path, "rb") as file:
            if kind == ".jsonl":
                yield from _json_lines(path, file)
            else:
                batches = pq.ParquetFile(file).iter_batches() if kind == ".parquet" else pa.ipc.open_stream(file)
                for batch in batches:
                    yield from batch.to_pylist()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; set data.train and data.heldout to files that exist") from None
    except PermissionError as error:
        raise DataError(f"{path}: not allowed to read it: {error}") from error
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: cannot be read as {kind[1:]}: {error}") from error


def _json_lines(path: str, file: Any) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}: row {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}: row {number} is not an object with columns")
        yield row


def _prompt_row(where: str, row: Mapping[str, Any], source: PromptSource) -> PromptRow:
    columns = source.columns
    needed = [columns.get("prompt", "prompt"), columns.get("ground_truth", "reward_model")]
    if "data_source" in columns or not columns:
        needed.append(columns.get("data_source", "data_source"))
    if missing := [name for name in needed if name not in row]:
        raise DataError(
            f"{where}: missing column {', '.join(missing)}; needed are {', '.join(needed)} "
            f"(reward_model holds ground_truth); this row has {', '.join(row)}; `columns` of the set can name others"
        )
    if "ground_truth" in columns:
        truth = row[columns["ground_truth"]]
    else:
        truth = (_decoded(row["reward_model"]) or {}).get("ground_truth")
    if truth is None:
        name = columns.get("ground_truth", "reward_model.ground_truth")
        raise DataError(f"{where} has no {name}; every prompt needs one to be scored")
    extra_info = _decoded(row.get(columns.get("extra_info", "extra_info"))) or {}
    if not isinstance(extra_info, dict):
        raise DataError(f"{where}: extra_info must be a mapping, not {type(extra_info).__name__}")
    return PromptRow(
        where=where,
        messages=_messages(where, row[needed[0]]),
        data_source=str(row.get(columns.get("data_source", "data_source"), source.label)),
        ground_truth=truth if isinstance(truth, str) else json.dumps(truth),
        extra_info=extra_info,
    )


def _messages(where: str, prompt: Any) -> list[dict[str, Any]]:
    """The chat messages of a prompt; a text that is none is what the user says."""
    decoded = _decoded(prompt)
    if isinstance(decoded, str) and decoded.strip():
        return [{"role": "user", "content": decoded}]
    if not decoded:
        raise DataError(f"{where} has an empty prompt; give at least one chat message")
    if not isinstance(decoded, list) or not all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in decoded
    ):
        raise DataError(f"{where}: prompt must be a list of chat messages, each with role and content")
    return [{name: value for name, value in message.items() if value is not None} for message in decoded]


def _decoded(value: Any) -> Any:
    """A structure given as JSON text, decoded; everything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value

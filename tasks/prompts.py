"""Prompts: verl's data schema, the chat template, and the order in which prompts are drawn.

A row has `data_source`, `prompt` (chat messages), `reward_model.ground_truth` and optionally `extra_info`. Prompts are
drawn by a cursor that only ever grows: draw number d is prompt `order[d mod N]` of epoch `d div N`, so that every
prompt is drawn once per epoch whatever is cut, resumed or killed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq

from tasks.config import DataConfig, RunConfig
from tasks.faults import named_faults
from tasks.trajectory import Trajectory

COLUMNS = ("data_source", "prompt", "reward_model")


class DataError(ValueError):
    """A data file cannot be trained on; the message names file, row and column."""


@dataclass(frozen=True)
class Prompt:
    prompt_id: str
    data_source: str
    ground_truth: str
    tokens: np.ndarray  # [P] int32, chat template applied
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class PromptSet:
    """`dropped`: rows left out because they were longer than the limit."""

    prompts: tuple[Prompt, ...]
    dropped: int
    fingerprint: str


def load_prompts(path: str, tokenizer: Any, data: DataConfig) -> PromptSet:
    """Read a parquet or JSONL file (local path or fsspec URL) and tokenise its prompts with the chat template.

    Raises DataError naming the file, and the row (counted from 0) and column at fault.
    """
    prompts, dropped, digest = [], 0, hashlib.sha256()
    for number, row in enumerate(_rows(path)):
        prompt = _prompt(path, number, row, tokenizer)
        if len(prompt.tokens) > data.max_prompt_tokens:
            dropped += 1
            continue
        digest.update(repr((prompt.prompt_id, prompt.ground_truth)).encode() + prompt.tokens.tobytes())
        prompts.append(prompt)
    if not prompts and dropped:
        raise DataError(
            f"{path}: all {dropped} prompts are longer than data.max_prompt_tokens = {data.max_prompt_tokens}; raise it"
        )
    if not prompts:
        raise DataError(f"{path}: the file has no rows; a run needs at least one prompt")
    return PromptSet(tuple(prompts), dropped, digest.hexdigest())


def _rows(path: str) -> Iterator[dict[str, Any]]:
    kind = PurePosixPath(path).suffix
    if kind not in (".parquet", ".jsonl"):
        raise DataError(f"{path}: cannot read {kind or 'a file without ending'}; give a .parquet or .jsonl file")
    try:
        with named_faults(path), fsspec.open(path, "rb") as file:
            if kind == ".parquet":
                table = pq.ParquetFile(file)
                _require_columns(path, table.schema_arrow.names)
                for batch in table.iter_batches():
                    yield from batch.to_pylist()
            else:
                yield from _json_lines(path, file)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; set data.train and data.heldout to files that exist") from None
    except PermissionError as error:
        raise DataError(f"{path}: not allowed to read it: {error}") from error
    except (OSError, ValueError) as error:
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
            raise DataError(f"{path}: row {number} is not an object with the columns {', '.join(COLUMNS)}")
        _require_columns(f"{path}: row {number}", row)
        yield row


def _require_columns(where: str, columns: Any) -> None:
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise DataError(
            f"{where}: missing column {', '.join(missing)}; needed are {', '.join(COLUMNS)} "
            "(reward_model holds ground_truth)"
        )


def _prompt(path: str, number: int, row: dict[str, Any], tokenizer: Any) -> Prompt:
    truth = (row["reward_model"] or {}).get("ground_truth")
    if truth is None:
        raise DataError(f"{path}: row {number} has no reward_model.ground_truth; every prompt needs one to be scored")
    if not row["prompt"]:
        raise DataError(f"{path}: row {number} has an empty prompt; give at least one chat message")
    if not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in row["prompt"]):
        raise DataError(f"{path}: row {number}: prompt must be a list of chat messages, each with role and content")
    try:
        tokens = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    except Exception as error:
        raise DataError(f"{path}: row {number}: the chat template cannot render prompt: {error}") from error
    return Prompt(
        prompt_id=f"p{number:06d}",
        data_source=row["data_source"],
        ground_truth=truth if isinstance(truth, str) else json.dumps(truth),
        tokens=np.asarray(tokens, np.int32),
        extra_info=row.get("extra_info") or {},
    )


def load_tokenizer(model_directory: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model directory. Raises DataError if it has none, or no chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_directory, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise DataError(f"{model_directory}: has no tokenizer that transformers can load: {error}") from error
    if not tokenizer.chat_template:
        raise DataError(f"{model_directory}: its tokenizer has no chat template, so chat messages cannot be rendered")
    return tokenizer


_warm: dict[str, tuple[Any, PromptSet]] = {}


def warm_prompts(path: str, model_directory: str, config: RunConfig) -> tuple[Any, PromptSet]:
    """Tokenizer and prompts of `path`; read anew only when the file, the tokenizer or the settings have changed."""
    filesystem, root = fsspec.core.url_to_fs(path)
    try:
        unchanged = filesystem.checksum(root)
    except FileNotFoundError:
        unchanged = None  # load_prompts says what is wrong
    key = repr((path, unchanged, tokenizer_sha256(model_directory), config.data, config.model.trust_remote_code))
    if key not in _warm:
        tokenizer = load_tokenizer(model_directory, config.model.trust_remote_code)
        _warm[key] = tokenizer, load_prompts(path, tokenizer, config.data)
    return _warm[key]


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt")


def tokenizer_sha256(model_directory: str) -> str:
    """Fingerprint of a model directory's tokenizer, its chat template included."""
    files = [Path(model_directory, name) for name in (*TOKENIZER_FILES, "tokenizer.model")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files if file.exists())).hexdigest()


class Draws:
    """Draws groups from a prompt set, from a cursor on. Seeded: the same cursor always draws the same group."""

    def __init__(self, prompts: PromptSet, *, cursor: int, seed: int, shuffle: bool, group_size: int) -> None:
        self.cursor = cursor
        self._prompts = prompts.prompts
        self._seed = seed
        self._shuffle = shuffle
        self._group_size = group_size
        self._epoch = -1
        self._order = np.arange(len(self._prompts))

    def draw(self, iteration: int) -> list[Trajectory]:
        """The pending members of the next group, and the cursor moved past it."""
        epoch, position = divmod(self.cursor, len(self._prompts))
        if self._shuffle and epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))
            self._epoch = epoch
        prompt = self._prompts[self._order[position]]
        self.cursor += 1
        return [
            Trajectory(
                group_id=f"{prompt.prompt_id}.{epoch}",
                member=member,
                prompt_id=prompt.prompt_id,
                data_source=prompt.data_source,
                ground_truth=prompt.ground_truth,
                prompt_tokens=prompt.tokens,
                created_iteration=iteration,
            )
            for member in range(self._group_size)
        ]

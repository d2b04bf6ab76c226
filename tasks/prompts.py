"""Prompts: the chat template, and the order in which prompts are drawn.

Prompts are drawn by a cursor that only ever grows: draw d is entry d mod E of epoch d div E, where an epoch has each
prompt of a set as often as the set's weight says. So no prompt is skipped or repeated, whatever is cut or killed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from tasks.config import DataConfig, PromptSource, RunConfig
from tasks.prompt_files import DataError, PromptRow, read_rows
from tasks.trajectory import Trajectory


@dataclass(frozen=True)
class Prompt:
    prompt_id: str
    data_source: str
    ground_truth: str
    tokens: np.ndarray  # [P] int32, chat template applied
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one source. `too_long`, `duplicates`: rows left out, and why; `contradictions`: of the duplicates,
    those that state another ground truth than the row that is kept."""

    source: PromptSource
    prompts: tuple[Prompt, ...]
    fingerprint: str
    too_long: int = 0
    duplicates: int = 0
    contradictions: int = 0

    @property
    def draws_per_epoch(self) -> int:
        return max(1, round(self.source.weight * len(self.prompts)))


def fingerprint_of(sets: Sequence[PromptSet]) -> str:
    """Changes with any prompt, its order or a weight."""
    if [each.source.weight for each in sets] == [1.0]:
        return sets[0].fingerprint
    return hashlib.sha256(repr([(each.fingerprint, each.source.weight) for each in sets]).encode()).hexdigest()


def load_prompts(source: PromptSource, tokenizer: Any, data: DataConfig, prefix: str = "p") -> PromptSet:
    """Read a set and tokenise its prompts with the chat template; each is named by `prefix` and its row.

    Raises DataError naming the file, and the row (counted from 0) and column at fault.
    """
    prompts, digest = [], hashlib.sha256()
    truths: dict[str, str] = {}
    too_long = duplicates = contradictions = 0
    for number, row in enumerate(read_rows(source)):
        if data.duplicates == "drop":
            asked = json.dumps(row.messages, sort_keys=True)
            if asked in truths:
                duplicates += 1
                contradictions += truths[asked] != row.ground_truth
                continue
            truths[asked] = row.ground_truth
        tokens = _tokens(row, tokenizer, data)
        if len(tokens) > data.max_prompt_tokens:
            too_long += 1
            continue
        prompt = Prompt(f"{prefix}{number:06d}", row.data_source, row.ground_truth, tokens, row.extra_info)
        digest.update(repr((prompt.prompt_id, prompt.ground_truth)).encode() + prompt.tokens.tobytes())
        prompts.append(prompt)
    if not prompts and too_long:
        raise DataError(
            f"{source.path}: all {too_long} prompts are longer than data.max_prompt_tokens = {data.max_prompt_tokens}; "
            "raise it"
        )
    if not prompts:
        raise DataError(f"{source.path}: the file has no rows; a run needs at least one prompt")
    return PromptSet(source, tuple(prompts), digest.hexdigest(), too_long, duplicates, contradictions)


def _tokens(row: PromptRow, tokenizer: Any, data: DataConfig) -> np.ndarray:
    messages = row.messages
    if data.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
    try:
        tokens = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **data.template_options
        )
    except Exception as error:
        raise DataError(f"{row.where}: the chat template cannot render prompt: {error}") from error
    first = tokenizer.bos_token_id
    if first is not None and tokens[:1] != [first]:
        if data.add_bos is None:
            raise DataError(
                f"{row.where}: the chat template renders it without the tokenizer's beginning-of-sequence token "
                f"{tokenizer.bos_token!r}, which some models babble without; set data.add_bos to true to put it first, "
                "or to false if the model was trained without it"
            )
        if data.add_bos:
            tokens = [first, *tokens]
    return np.asarray(tokens, np.int32)


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


_warm: dict[str, tuple[Any, list[PromptSet]]] = {}


def warm_prompts(
    sources: Sequence[PromptSource], model_directory: str, config: RunConfig
) -> tuple[Any, list[PromptSet]]:
    """Tokenizer and sets of prompts; read anew only when a file, the tokenizer or the settings have changed."""
    state = [(source, _checksum(source.path)) for source in sources]
    key = repr((state, tokenizer_sha256(model_directory), config.data, config.model.trust_remote_code))
    if key not in _warm:
        tokenizer = load_tokenizer(model_directory, config.model.trust_remote_code)
        prefixes = ["p"] if len(sources) == 1 else [f"{source.label}-" for source in sources]
        sets = [
            load_prompts(source, tokenizer, config.data, prefix)
            for source, prefix in zip(sources, prefixes, strict=True)
        ]
        _warm[key] = tokenizer, sets
    return _warm[key]


def _checksum(path: str) -> list[Any] | None:
    """Changes with a file, or with any file of a folder."""
    filesystem, root = fsspec.core.url_to_fs(path)
    try:
        files = sorted(filesystem.find(root)) if filesystem.isdir(root) else [root]
        return [filesystem.checksum(file) for file in files]
    except FileNotFoundError:
        return None  # load_prompts says what is wrong


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt")


def tokenizer_sha256(model_directory: str) -> str:
    """Fingerprint of a model directory's tokenizer, its chat template included."""
    files = [Path(model_directory, name) for name in (*TOKENIZER_FILES, "tokenizer.model")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files if file.exists())).hexdigest()


class Draws:
    """Draws groups from sets of prompts, from a cursor on. Seeded: the same cursor always draws the same group."""

    def __init__(self, sets: Sequence[PromptSet], *, cursor: int, seed: int, shuffle: bool, group_size: int) -> None:
        self.cursor = cursor
        self._sets = sets
        self._seed = seed
        self._shuffle = shuffle
        self._group_size = group_size
        self._epoch = -1
        self._entries = np.empty((0, 3), np.int64)
        self._length = sum(each.draws_per_epoch for each in sets)

    def draw(self, iteration: int) -> list[Trajectory]:
        """The pending members of the next group, and the cursor moved past it."""
        epoch, position = divmod(self.cursor, self._length)
        if epoch != self._epoch:
            self._epoch, self._entries = epoch, self._entries_of(epoch)
        number, place, lap = self._entries[position]
        prompt = self._sets[number].prompts[place]
        self.cursor += 1
        return [
            Trajectory(
                group_id=f"{prompt.prompt_id}.{lap}",
                member=member,
                prompt_id=prompt.prompt_id,
                data_source=prompt.data_source,
                ground_truth=prompt.ground_truth,
                prompt_tokens=prompt.tokens,
                created_iteration=iteration,
            )
            for member in range(self._group_size)
        ]

    def _entries_of(self, epoch: int) -> np.ndarray:
        """[E, 3] what an epoch draws: set, prompt of the set, and how often the set has been gone through before."""
        parts = []
        for number, each in enumerate(self._sets):
            size, count = len(each.prompts), each.draws_per_epoch
            laps, places = np.divmod(np.arange(epoch * count, (epoch + 1) * count), size)
            drawn = np.concatenate([self._order(size, lap, number)[places[laps == lap]] for lap in np.unique(laps)])
            parts.append(np.stack([np.full(count, number), drawn, laps], axis=1))
        entries = np.concatenate(parts)
        if self._shuffle and len(self._sets) > 1:
            entries = entries[np.random.default_rng([self._seed, epoch, len(self._sets), 0]).permutation(len(entries))]
        return entries

    def _order(self, size: int, lap: int, number: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(size)
        return np.random.default_rng([self._seed, lap, number] if number else [self._seed, lap]).permutation(size)

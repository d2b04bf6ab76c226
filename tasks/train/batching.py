"""Mini-batches and micro-batches. Pure: which rows run together on which rank, and the tensors of a micro-batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tasks.trajectory import TrainingRow


def row_tokens(row: TrainingRow) -> int:
    """Prompt and response, what a forward pass computes."""
    return len(row.prompt_tokens) + row.tokens


def mini_batches(rows: Sequence[TrainingRow], size: int) -> list[list[TrainingRow]]:
    """Consecutive mini-batches of `size` rows; the last may be shorter, none is empty."""
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]


def micro_batches(rows: Sequence[TrainingRow], max_tokens: int, ranks: int) -> list[list[list[TrainingRow]]]:
    """[ranks][count] micro-batches of at most `max_tokens`, padding included; a longer row runs alone.

    Rows of like length run together, so that there is little padding, and micro-batches that run at the same time on
    different ranks are of like size. Every rank gets the same number, so that none waits in a collective for another;
    where there are fewer rows, some are empty.
    """
    longest_first = sorted(rows, key=row_tokens, reverse=True)
    count = math.ceil(len(_runs(longest_first, max_tokens)) / ranks)
    too_few, enough = 0, max_tokens
    while enough - too_few > 1:  # the smallest budget that needs no more micro-batches makes them even
        middle = (too_few + enough) // 2
        if len(_runs(longest_first, middle)) > count * ranks:
            too_few = middle
        else:
            enough = middle
    runs = _runs(longest_first, enough)
    runs += [[] for _ in range(count * ranks - len(runs))]
    return [runs[rank::ranks] for rank in range(ranks)]


def _runs(longest_first: Sequence[TrainingRow], max_tokens: int) -> list[list[TrainingRow]]:
    """Consecutive rows whose number times the length of the first is at most `max_tokens`."""
    runs: list[list[TrainingRow]] = []
    for row in longest_first:
        if runs and (len(runs[-1]) + 1) * row_tokens(runs[-1][0]) <= max_tokens:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


@dataclass(frozen=True)
class MicroBatch:
    """Rows padded on the right, [B, S]; what is known of their response tokens, one row's after the other's, [T].

    A causal model never looks to the right: no row is touched by its padding or by another row, whatever the
    architecture and the attention kernel, and without a mask. `predicting`: where in the flattened [B·S] positions the
    logits of each response token are.
    """

    tokens: torch.Tensor  # [B, S] int64
    predicting: torch.Tensor  # [T] int64
    targets: torch.Tensor  # [T] int64
    behaviour_logprobs: torch.Tensor  # [T] float32
    versions: torch.Tensor  # [T] int64
    advantages: torch.Tensor  # [T] float32
    loss_mask: torch.Tensor  # [T] bool
    rows: torch.Tensor  # [T] int64: which of the B rows a token belongs to

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        return MicroBatch(*(getattr(self, field.name).to(device) for field in dataclasses.fields(self)))


def collate(rows: Sequence[TrainingRow]) -> MicroBatch:
    """One micro-batch; of no rows, a single token that predicts nothing (it keeps a rank in step with the others)."""
    width = max(map(row_tokens, rows), default=1)
    tokens = np.zeros((max(len(rows), 1), width), np.int64)
    predicting = [np.empty(0, np.int64)]
    for index, row in enumerate(rows):
        prompt, length = len(row.prompt_tokens), row_tokens(row)
        tokens[index, :prompt], tokens[index, prompt:length] = row.prompt_tokens, row.response_tokens
        predicting.append(index * width + np.arange(prompt - 1, length - 1))

    def of_responses(kind: type, values: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.empty(0), *values]).astype(kind))

    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        predicting=torch.from_numpy(np.concatenate(predicting)),
        targets=of_responses(np.int64, [row.response_tokens for row in rows]),
        behaviour_logprobs=of_responses(np.float32, [row.logprobs for row in rows]),
        versions=of_responses(np.int64, [row.versions() for row in rows]),
        advantages=of_responses(np.float32, [np.full(row.tokens, row.advantage) for row in rows]),
        loss_mask=of_responses(np.bool_, [np.arange(row.tokens) >= row.masked_tokens for row in rows]),
        rows=of_responses(np.int64, [np.full(row.tokens, index) for index, row in enumerate(rows)]),
    )

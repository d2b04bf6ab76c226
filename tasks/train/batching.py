"""Mini-batches and micro-batches. Pure: which rows run together, and the tensors of a packed micro-batch."""

from __future__ import annotations

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
    """[ranks][count] micro-batches of at most `max_tokens`; a longer row runs alone.

    Every rank gets the same number, so that none waits in a collective for another; where there are fewer rows, some
    are empty. Longest rows are placed first, each where the fewest tokens are, which balances the ranks.
    """
    packs: list[list[TrainingRow]] = []
    room: list[int] = []
    for row in sorted(rows, key=row_tokens, reverse=True):
        fitting = [index for index, left in enumerate(room) if left >= row_tokens(row)]
        if fitting:
            index = min(fitting, key=lambda candidate: room[candidate])
            packs[index].append(row)
            room[index] -= row_tokens(row)
        else:
            packs.append([row])
            room.append(max_tokens - row_tokens(row))
    while len(packs) < ranks and any(len(pack) > 1 for pack in packs):
        largest = max((pack for pack in packs if len(pack) > 1), key=lambda pack: sum(map(row_tokens, pack)))
        packs.append([largest.pop()])
    loads: list[list[list[TrainingRow]]] = [[] for _ in range(ranks)]
    for pack in sorted(packs, key=lambda pack: sum(map(row_tokens, pack)), reverse=True):
        lightest = min(loads, key=lambda load: (len(load), sum(row_tokens(row) for other in load for row in other)))
        lightest.append(pack)
    count = max(len(load) for load in loads)
    return [load + [[] for _ in range(count - len(load))] for load in loads]


@dataclass(frozen=True)
class Packed:
    """Rows one after the other, without padding. S: all tokens, T: response tokens.

    `predicting` [T]: the position whose logits predict each response token.
    """

    tokens: torch.Tensor  # [S] int64
    positions: torch.Tensor  # [S] int64, from 0 in each row
    row_ids: torch.Tensor  # [S] int64, which row a token belongs to
    predicting: torch.Tensor  # [T] int64
    targets: torch.Tensor  # [T] int64
    behaviour_logprobs: torch.Tensor  # [T] float32
    versions: torch.Tensor  # [T] int64
    advantages: torch.Tensor  # [T] float32
    loss_mask: torch.Tensor  # [T] bool


def pack(rows: Sequence[TrainingRow], device: torch.device | str = "cpu") -> Packed:
    """One packed micro-batch; of no rows, a single token that predicts nothing (it keeps a rank in step)."""
    if not rows:
        one = torch.zeros(1, dtype=torch.int64, device=device)
        none = one[:0]
        return Packed(one, one, one, none, none, none.float(), none, none.float(), none.bool())
    lengths = [row_tokens(row) for row in rows]
    starts = np.cumsum([0, *lengths[:-1]])
    fields = {
        "tokens": [np.concatenate([row.prompt_tokens, row.response_tokens]) for row in rows],
        "positions": [np.arange(length) for length in lengths],
        "row_ids": [np.full(length, index) for index, length in enumerate(lengths)],
        "predicting": [
            start + len(row.prompt_tokens) - 1 + np.arange(row.tokens) for start, row in zip(starts, rows, strict=True)
        ],
        "targets": [row.response_tokens for row in rows],
        "behaviour_logprobs": [row.logprobs for row in rows],
        "versions": [row.versions() for row in rows],
        "advantages": [np.full(row.tokens, row.advantage, np.float32) for row in rows],
        "loss_mask": [np.arange(row.tokens) >= row.masked_tokens for row in rows],
    }
    kinds = {"behaviour_logprobs": torch.float32, "advantages": torch.float32, "loss_mask": torch.bool}
    return Packed(
        **{
            name: torch.from_numpy(np.concatenate(parts)).to(device, kinds.get(name, torch.int64))
            for name, parts in fields.items()
        }
    )

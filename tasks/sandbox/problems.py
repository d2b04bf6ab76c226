"""The sandbox's task: reduce a sum step by step, modulo 10.

    python -m tasks.sandbox.problems     # writes tasks/sandbox/train.parquet and heldout.parquet

The prompt `8+4+6+4=` is answered by `2+6+4;8+4;2`: each step replaces the first two terms by the last digit of their
sum, and the last step is the answer. A sum of n terms has a response of n(n−1) tokens, its end included, and the number
of terms is geometric, so that a few responses are many times longer than most: what partial rollouts are for.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "sandbox/sums"
MIN_TERMS = 3  # shorter sums are too few to be distinct
MAX_TERMS = 20
ONE_MORE = 0.86  # share of the sums of n terms or more that have more than n

HELDOUT_ROWS, HELDOUT_SEED = 256, 1
TRAIN_ROWS, TRAIN_SEED = 4096, 2

SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct({"index": pa.int64(), "terms": pa.int64()}),
    }
)


def solution(terms: list[int]) -> str:
    """All steps from the first reduction to the answer, joined by `;`."""
    steps = []
    while len(terms) > 1:
        terms = [(terms[0] + terms[1]) % 10, *terms[2:]]
        steps.append("+".join(map(str, terms)))
    return ";".join(steps)


def problems(count: int, seed: int, exclude: Collection[str] = ()) -> list[dict[str, Any]]:
    """`count` rows in verl's schema with distinct prompts, none of them in `exclude`.

    Pure: the same arguments give the same rows on every platform (only `random.random()` is used, the one method
    Python promises to keep). A prompt already taken is drawn again with as many terms, so that lengths keep their
    distribution.
    """
    rng = random.Random(seed)
    taken = set(exclude)
    rows = []
    for index in range(count):
        length = _number_of_terms(rng)
        terms = _digits(rng, length)
        while (prompt := "+".join(map(str, terms)) + "=") in taken:
            terms = _digits(rng, length)
        taken.add(prompt)
        rows.append(
            {
                "data_source": DATA_SOURCE,
                "prompt": [{"role": "user", "content": prompt}],
                "reward_model": {"style": "rule", "ground_truth": solution(terms).rpartition(";")[2]},
                "extra_info": {"index": index, "terms": length},
            }
        )
    return rows


def heldout_problems() -> list[dict[str, Any]]:
    """The rows of heldout.parquet."""
    return problems(HELDOUT_ROWS, HELDOUT_SEED)


def train_problems() -> list[dict[str, Any]]:
    """The rows of train.parquet; no prompt is also in heldout.parquet."""
    heldout = [row["prompt"][0]["content"] for row in heldout_problems()]
    return problems(TRAIN_ROWS, TRAIN_SEED, exclude=heldout)


def _number_of_terms(rng: random.Random) -> int:
    """Geometric from MIN_TERMS; beyond MAX_TERMS drawn again, so that no length piles up at the limit."""
    length = MIN_TERMS
    while rng.random() < ONE_MORE:
        length += 1
        if length > MAX_TERMS:
            length = MIN_TERMS
    return length


def _digits(rng: random.Random, length: int) -> list[int]:
    return [int(10 * rng.random()) for _ in range(length)]


def main() -> None:
    """Write the two files beside this module."""
    for name, rows in (("train", train_problems()), ("heldout", heldout_problems())):
        path = Path(__file__).with_name(f"{name}.parquet")
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path, compression="zstd")
        print(f"{path}: {len(rows)} problems, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()

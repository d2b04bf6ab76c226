"""GSM8K (arXiv:2110.14168): a whole number after `####`, as in the data set's own solutions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_MARKED = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Accuracy 1 if the number after the last `####` is that of the ground truth, a solution or its number alone."""
    found = _MARKED.findall(solution_str)
    truth = _MARKED.findall(ground_truth) or _NUMBER.findall(ground_truth)
    if not truth:
        raise ValueError(f"the ground truth {ground_truth!r} has no number")
    answer = _plain(found[-1]) if found else None
    right = answer is not None and Decimal(answer) == Decimal(_plain(truth[-1]))
    return {"accuracy": float(right), "answer": answer}


def last_number(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Like `compute_score`, but the last number of the response counts, marked or not."""
    found = _NUMBER.findall(solution_str)
    return compute_score(data_source, f"#### {found[-1]}" if found else "", ground_truth, extra_info)


def _plain(number: str) -> str:
    return number.replace(",", "")

"""Exact match: for answers that are a word, a letter or a string of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Accuracy 1 if the last line that is not empty is the ground truth, but for spaces around it; else 0."""
    lines = [line.strip() for line in solution_str.splitlines() if line.strip()]
    answer = lines[-1] if lines else None
    return {"accuracy": float(answer == ground_truth.strip()), "answer": answer}

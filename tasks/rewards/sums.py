"""The scorer of the sandbox's sums (`tasks/sandbox/problems.py`): only the answer counts, not the steps before it."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Accuracy 1 if what follows the last `;` (the whole response, if there is none) is the ground truth, else 0."""
    answer = solution_str.rpartition(";")[2].strip()
    return {"accuracy": float(answer == ground_truth), "answer": answer}

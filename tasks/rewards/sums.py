"""The scorer of the sandbox's sums (`tasks/sandbox/problems.py`): only the answer counts, not the steps before it."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
) -> float:
    """1.0 if what follows the last `;` (the whole response, if there is none) is the ground truth, else 0.0.

    The signature is verl's: every scorer is called with all four arguments, whether it needs them or not.
    """
    return 1.0 if solution_str.rpartition(";")[2].strip() == ground_truth else 0.0

"""Group-relative advantages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EPSILON = 1e-6


def group_advantages(rewards: Sequence[float], group_ids: Sequence[str], *, scale: bool = True) -> np.ndarray:
    """[N] float64: A = (R − mean) / (std + 1e-6) over the rows of the same group (DAPO, arXiv:2503.14476, eq. 9).

    Without `scale` A = R − mean, as in Dr. GRPO (arXiv:2503.20783, section 3.2).

    rewards: [N]; group_ids: [N]. Rows are joined by id, wherever they stand; std is the sample standard deviation
    (ddof 1), and a group of one has advantage 0. Raises ValueError if the two differ in length.
    """
    if len(rewards) != len(group_ids):
        raise ValueError(f"{len(rewards)} rewards but {len(group_ids)} group ids")
    values = np.asarray(rewards, np.float64)
    _, group, size = np.unique(np.asarray(group_ids, object).astype(str), return_inverse=True, return_counts=True)
    mean = np.bincount(group, weights=values) / size if len(values) else np.empty(0)
    deviation = values - mean[group]
    if not scale:
        return deviation
    variance = np.bincount(group, weights=deviation**2) / np.maximum(size - 1, 1) if len(values) else np.empty(0)
    return deviation / (np.sqrt(variance)[group] + EPSILON)

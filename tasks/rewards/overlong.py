"""Soft overlong punishment: a response close to its budget loses reward gradually instead of all at once."""

from __future__ import annotations


def soft_overlong_penalty(length: int, max_response_tokens: int, overlong_cache: int) -> float:
    """Penalty in [−1, 0] for a response of `length` tokens (DAPO, arXiv:2503.14476, eq. 13).

    0 up to L − C, then falling linearly to −1 at the budget L = `max_response_tokens`, and −1 beyond it, with
    C = `overlong_cache`. Raises ValueError unless 0 < C < L.
    """
    if not 0 < overlong_cache < max_response_tokens:
        raise ValueError(f"overlong_cache {overlong_cache} must lie between 0 and {max_response_tokens}")
    unpunished = max_response_tokens - overlong_cache
    return max(-1.0, min(0.0, (unpunished - length) / overlong_cache))

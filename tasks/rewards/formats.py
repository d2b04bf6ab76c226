"""Rewards for the form of a response, to be added to its accuracy as `reward.terms`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tasks.rewards.math import last_answer

_THOUGHT = re.compile(r"\s*(?:<think>)?(?:(?!</?think>).)*</think>(?:(?!</?think>).)*\S\s*", re.DOTALL)


def thinks_then_answers(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1 if the response is one `<think>…</think>` and something after it (DeepSeek-R1, arXiv:2501.12948, section 2.2).

    The opening tag may be missing, since some chat templates put it into the prompt.
    """
    return float(_THOUGHT.fullmatch(solution_str) is not None)


def states_an_answer(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1 if there is an answer that `tasks.rewards.math` can find, right or wrong."""
    return float(last_answer(solution_str) is not None)

"""What a set of answers says of a policy: avg@n, pass@k and maj@k, with intervals over prompts. Pure."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
MAX_SUBSETS = 1000


@dataclass(frozen=True)
class Answer:
    """`accuracy`: in [0, 1]; `text`: what was read from the response, None if nothing was."""

    accuracy: float
    text: str | None = None

    @property
    def right(self) -> bool:
        return self.accuracy == 1.0


Prompts = Sequence[Sequence[Answer]]  # the answers to each prompt


def accuracy_metrics(prompts: Prompts, ks: Sequence[int]) -> dict[str, float]:
    """avg@n (`accuracy`) and, for each k, `pass@k` and `maj@k`: means over prompts, each with `_low` and `_high`.

    maj@k is left out where the scorer names no answers; prompts with fewer than k answers do not count at k.
    """
    answered = [answers for answers in prompts if answers]
    per_prompt = [_mean([answer.accuracy for answer in answers]) for answers in answered]
    metrics = {
        **_with_interval("accuracy", per_prompt),
        "accuracy_standard_error": standard_error(per_prompt),
    }
    named = any(answer.text is not None for answers in answered for answer in answers)
    for k in ks:
        enough = [answers for answers in answered if len(answers) >= k]
        metrics |= _with_interval(f"pass@{k}", [pass_at_k(answers, k) for answers in enough])
        if named:
            metrics |= _with_interval(f"maj@{k}", [maj_at_k(answers, k) for answers in enough])
    return metrics


def pass_at_k(answers: Sequence[Answer], k: int) -> float:
    """Probability that k of the n answers hold a right one: 1 − C(n − c, k) / C(n, k), c of them being right.

    Unbiased for the same probability of k fresh answers (arXiv:2107.03374, eq. 1).
    """
    wrong = sum(not answer.right for answer in answers)
    return 1.0 - math.comb(wrong, k) / math.comb(len(answers), k)


def maj_at_k(answers: Sequence[Answer], k: int) -> float:
    """Probability that the most frequent of k of the n answers is right (arXiv:2203.11171, section 2).

    Right answers are one answer, however they are written; responses without an answer have no vote; a tie is broken by
    chance. The mean over all subsets of k, or over 1,000 of them (always the same ones) where there are more.
    """
    n = len(answers)
    if math.comb(n, k) <= MAX_SUBSETS:
        subsets = itertools.combinations(range(n), k)
    else:
        random = np.random.default_rng([n, k])
        subsets = (random.choice(n, k, replace=False) for _ in range(MAX_SUBSETS))
    return _mean([_vote([answers[index] for index in subset]) for subset in subsets])


def _vote(answers: Sequence[Answer]) -> float:
    votes = Counter((answer.right, "" if answer.right else answer.text) for answer in answers if _votes(answer))
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [right for (right, _), count in votes.items() if count == most]
    return sum(winners) / len(winners)


def _votes(answer: Answer) -> bool:
    return answer.right or answer.text is not None


def standard_error(per_prompt: Sequence[float]) -> float:
    """Of the mean over prompts, s / √N: answers to one prompt are not independent (arXiv:2411.00640, section 2.2)."""
    if len(per_prompt) < 2:
        return math.nan
    return float(np.std(per_prompt, ddof=1)) / math.sqrt(len(per_prompt))


def interval(per_prompt: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean over prompts, from Student's t distribution, within [0, 1]; NaN for under 2 prompts."""
    if len(per_prompt) < 2:
        return math.nan, math.nan
    mean = _mean(per_prompt)
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(per_prompt) - 1)) * standard_error(per_prompt)
    return max(0.0, mean - reach), min(1.0, mean + reach)


def _with_interval(name: str, per_prompt: Sequence[float]) -> dict[str, float]:
    low, high = interval(per_prompt)
    return {name: _mean(per_prompt), f"{name}_low": low, f"{name}_high": high}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def over_sets(of_each: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of all sets together: the mean over sets of what every set has, whatever their sizes.

    Of several sets the accuracy has its standard error, and nothing an interval.
    """
    if len(of_each) == 1:
        return dict(of_each[0])
    shared = [name for name in of_each[0] if all(name in metrics for metrics in of_each)]
    together = {
        name: _mean([metrics[name] for metrics in of_each]) for name in shared if not name.endswith(("_low", "_high"))
    }
    errors = [metrics["accuracy_standard_error"] for metrics in of_each]
    return together | {"accuracy_standard_error": math.hypot(*errors) / len(errors)}

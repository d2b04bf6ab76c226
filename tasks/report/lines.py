"""What a run prints of each iteration: one line of results, one of the books."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

INDENT = " " * len("iteration   0 ")


def iteration_lines(metrics: Mapping[str, float]) -> list[str]:
    """The lines of one iteration, from its merged metrics (see `tasks/report/report.py` for their meaning)."""
    m = metrics
    lines = [
        f"iteration {m['iteration']:3.0f} │ reward {_number(m['carry/reward'], '+.2f')} "
        f"accuracy {_number(m['carry/accuracy'], '.2f')} length {_number(m['carry/response_tokens'], '.0f')} │ "
        f"{m['ledger/groups_trained']:.0f} of {m['carry/ready_groups']:.0f} ready groups trained │ "
        f"of the tokens {m['carry/off_policy_share']:.0%} off-policy {m['carry/resumed_share']:.0%} resumed",
        f"{INDENT}│ {m['generate/tokens_per_second']:,.0f} tokens/s │ generate {m['generate/seconds']:.1f} s "
        f"carry-over {m['carry/seconds']:.1f} s train {m['train/seconds']:.1f} s",
    ]
    lines += [f"{INDENT}│ {kind}: {_account(metrics, kind)}" for kind in ("groups", "tokens")]
    return [*(evaluation_lines(m) if "evaluate/accuracy" in m else []), *lines]


def evaluation_lines(metrics: Mapping[str, float]) -> list[str]:
    """Held-out accuracy of the policy that an iteration starts with, or of a checkpoint; of each set, if several."""
    when = f"before iteration {metrics['iteration']:.0f}: " if "iteration" in metrics else ""
    sets = sorted({name.split("/")[1] for name in metrics if name.startswith("evaluate/") and name.count("/") == 2})
    lines = [f"{when}held-out {_evaluation(metrics, 'evaluate/')}"]
    return lines + [f"{' ' * len(when)}{label}: {_evaluation(metrics, f'evaluate/{label}/')}" for label in sets]


def _evaluation(metrics: Mapping[str, float], prefix: str) -> str:
    m = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    error = _number(m["accuracy_standard_error"], ".3f")
    line = f"accuracy {m['accuracy']:.3f} ± {error}, {m['response_tokens']:.0f} tokens"
    if m["truncated_share"]:
        line += f", {m['truncated_share']:.1%} truncated"
    for kind in ("pass", "maj"):
        ks = [int(name.removeprefix(f"{kind}@")) for name in m if re.fullmatch(rf"{kind}@\d+", name)]
        if ks:
            k = max(ks)
            line += f", {kind}@{k} {m[f'{kind}@{k}']:.3f}"
            if f"{kind}@{k}_low" in m:
                low, high = (_number(m[f"{kind}@{k}_{end}"], ".3f") for end in ("low", "high"))
                line += f" [{low}, {high}]"
    return line


def _account(metrics: Mapping[str, float], kind: str) -> str:
    value = {
        name.removeprefix(f"ledger/{kind}_"): int(amount)
        for name, amount in metrics.items()
        if name.startswith(f"ledger/{kind}_")
    }
    entered = "drawn" if kind == "groups" else "generated"
    parts = [f"{value[name]:,} {name.replace('_out', '')}" for name in ("trained", "masked", "filtered", "failed")]
    parts += [f"{value['discarded']:,} discarded", f"{value['carried_out']:,} carried"]
    return f"{value['carried_in']:,} carried in + {value['entered']:,} {entered} = " + " + ".join(
        part for part in parts if not part.startswith("0 ") or part.endswith(("trained", "carried"))
    )


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)

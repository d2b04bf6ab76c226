"""What a run prints of each iteration: one line of results, one of the books."""

from __future__ import annotations

import math
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
    if "evaluate/accuracy" in m:
        lines.insert(0, evaluation_line(m))
    return lines


def evaluation_line(metrics: Mapping[str, float]) -> str:
    """Held-out accuracy of the policy that an iteration starts with."""
    return (
        f"before iteration {metrics['iteration']:.0f}: held-out accuracy {metrics['evaluate/accuracy']:.3f} "
        f"± {metrics['evaluate/accuracy_standard_error']:.3f}, {metrics['evaluate/response_tokens']:.0f} tokens"
    )


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

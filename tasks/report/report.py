"""The report of a run: `metrics.parquet` (one row an iteration) and `report.html` (pictures of it), renewed by every
iteration."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tasks.config import RunConfig
from tasks.report.metrics import METRICS, describe
from tasks.report.page import (
    Paint,
    body,
    curves,
    escape,
    figure,
    figures,
    heading,
    number,
    page,
    paragraph,
    stacked,
    table,
    tiles,
)
from tasks.storage import write_file, write_table

History = Sequence[dict[str, float]]


class Chart(NamedTuple):
    """Curves over iterations: each a metric and its legend; the unit is the metric's."""

    title: str
    lines: tuple[tuple[str, str], ...]
    kind: str = "curves"  # curves, log or stacked


SECTIONS: dict[str, tuple[Chart, ...]] = {
    "Learning": (
        Chart("Reward", (("carry/reward", "ready groups"),)),
        Chart(
            "Accuracy",
            (
                ("carry/accuracy", "training prompts"),
                ("evaluate/accuracy", "held-out"),
                ("carry/trained_accuracy", "batch"),
            ),
        ),
        Chart(
            "Response length",
            (
                ("carry/response_tokens", "ready groups"),
                ("carry/trained_response_tokens", "batch"),
                ("evaluate/response_tokens", "held-out"),
            ),
        ),
        Chart(
            "Truncated responses", (("carry/truncated_share", "ready groups"), ("evaluate/truncated_share", "held-out"))
        ),
    ),
    "Policy": (
        Chart("Entropy", (("train/entropy", "policy"),)),
        Chart("Clipping", (("train/clip_fraction", "clipped"), ("train/dual_clip_fraction", "dual clip"))),
        Chart("KL divergence of an update", (("train/kl", "k3 estimate"),)),
        Chart("Gradient norm", (("train/gradient_norm", "before clipping"),)),
        Chart("Loss", (("train/loss", "objective"),)),
        Chart("Learning rate", (("train/learning_rate", "AdamW"),)),
    ),
    "Old tokens": (
        Chart("Off-policy", (("carry/off_policy_share", "older weights"), ("carry/resumed_share", "cut and resumed"))),
        Chart("Staleness", (("carry/mean_version_lag", "mean lag"), ("carry/max_version_lag", "greatest lag"))),
        Chart(
            "Importance weights",
            (("train/importance_weight", "mean"), ("train/effective_sample_share", "effective sample share")),
        ),
        Chart(
            "Engine and trainer",
            (("train/logprob_difference_fresh", "fresh tokens"), ("train/logprob_difference_stale", "stale tokens")),
            "log",
        ),
    ),
    "Books": (
        Chart(
            "Where groups went",
            tuple(
                (f"ledger/groups_{name}", name.replace("_out", ""))
                for name in ("trained", "filtered", "failed", "discarded", "carried_out")
            ),
            "stacked",
        ),
        Chart(
            "Where tokens went",
            tuple(
                (f"ledger/tokens_{name}", name.replace("_out", ""))
                for name in ("trained", "masked", "filtered", "failed", "discarded", "carried_out")
            ),
            "stacked",
        ),
        Chart(
            "Cut and resumed",
            (("generate/cut_trajectories", "cut"), ("generate/resumed_trajectories", "resumed")),
        ),
    ),
    "Speed": (
        Chart("Sampling", (("generate/tokens_per_second", "sampled"),)),
        Chart(
            "Time of an iteration",
            (("generate/seconds", "generate"), ("carry/seconds", "carry-over"), ("train/seconds", "train")),
            "stacked",
        ),
        Chart("Computed once more", (("generate/reprefilled_tokens", "prompt and kept tokens"),)),
    ),
}


def metrics_table(history: History) -> pa.Table:
    names = sorted({name for row in history for name in row})
    return pa.table({name: pa.array([row.get(name) for row in history], pa.float64()) for name in names})


def write_report(config: RunConfig, history: History) -> str:
    """Write `metrics.parquet` and `report.html` into the run's directory; returns the report's body, for a deck."""
    write_table(f"{config.run_directory}/metrics.parquet", metrics_table(history))
    content = report_body(config, history)
    write_file(f"{config.run_directory}/report.html", page(f"Run {config.name}", content).encode())
    return content


def report_body(config: RunConfig, history: History) -> str:
    """What `report.html` shows of a run, as the inside of a page."""
    parts = [heading(f"Run {config.name}", 1), paragraph(summary(history)), tiles(_tiles(config, history))]
    findings = "".join(
        f'<li class="{"fine" if fine else "look"}">{escape(text)}</li>' for fine, text in health(config, history)
    )
    parts += [heading("Health"), f"<ul>{findings}</ul>"]
    for section, charts in SECTIONS.items():
        drawn = [(chart, _lines(chart, history)) for chart in charts]
        parts += [heading(section), figures(_draw(chart, lines) for chart, lines in drawn if lines)]
        if section == "Learning":
            parts.append(figures(_draw(chart, _lines(chart, history)) for chart in _named_charts(history)))
    parts += [heading("Every metric"), _metric_table(history)]
    parts += [heading("Recipe"), f"<pre>{escape(config.model_dump_json(indent=2))}</pre>"]
    return body(*parts)


def summary(history: History) -> str:
    """The run in a sentence or two."""
    held_out = _known(history, "evaluate/accuracy")
    trained = _iterations(history)
    parts = [f"{len(trained)} iterations"]
    if len(held_out) > 1:
        parts.append(f"held-out accuracy from {held_out[0]:.3f} to {held_out[-1]:.3f}")
    if trained:
        tokens = [row["ledger/tokens_trained"] + row["ledger/tokens_masked"] for row in trained]
        resumed = np.dot([row["carry/resumed_share"] for row in trained], tokens)
        parts.append(
            f"{resumed / max(sum(tokens), 1):.0%} of the trained tokens from responses that were cut and resumed"
        )
        parts.append(f"{np.median(_known(trained, 'generate/tokens_per_second')):,.0f} tokens/s sampled (median)")
    return "; ".join(parts)


def health(config: RunConfig, history: History) -> list[tuple[bool, str]]:
    """What to know before any curve: (fine, statement) of everything that would make a run worthless or slow."""
    rows = _iterations(history)
    if not rows:
        return [(False, "no iteration is complete yet")]
    last = rows[-1]

    def total(name: str) -> int:
        return int(sum(_known(rows, name)))

    short = sum(row["ledger/groups_trained"] < config.train.batch_groups for row in rows)
    failed, scored = total("generate/failed_scores"), max(total("carry/scored_groups") * config.train.group_size, 1)
    findings = [
        (
            all(map(_balanced, rows)),
            f"books of groups and tokens balance in {sum(map(_balanced, rows))} of {len(rows)} iterations",
        ),
        (not short, f"{len(rows) - short} of {len(rows)} batches were full ({config.train.batch_groups} groups)"),
        (failed <= 0.01 * scored, f"{failed} scores failed"),
        (not total("carry/quarantined_rows"), f"{total('carry/quarantined_rows')} rows were put aside as broken"),
        (
            not total("train/skipped_updates") + total("train/nonfinite_tokens"),
            f"{total('train/skipped_updates')} updates were skipped, "
            f"{total('train/nonfinite_tokens')} tokens had no finite log-prob",
        ),
        (
            not last["carry/truncated_share"] >= 0.2,  # also where no group was ready
            f"{number(last['carry/truncated_share'], '.0%')} of the newest responses ended by their budget",
        ),
    ]
    fresh = _known(rows, "train/logprob_difference_fresh")
    if fresh:
        limit = config.objective.max_logprob_difference or 0.05
        findings.append(
            (max(fresh) <= limit, f"engine and trainer differ by at most {max(fresh):.2g} nats on fresh tokens")
        )
    entropy = _known(rows, "train/entropy")
    if entropy:
        findings.append(
            (entropy[-1] > 0.1 * entropy[0], f"entropy went from {entropy[0]:.3g} to {entropy[-1]:.3g} nats")
        )
    return findings


def _balanced(row: dict[str, float]) -> bool:
    return all(
        row[f"ledger/{kind}_carried_in"] + row[f"ledger/{kind}_entered"]
        == sum(
            row[f"ledger/{kind}_{name}"]
            for name in ("trained", "masked", "filtered", "failed", "discarded", "carried_out")
        )
        for kind in ("groups", "tokens")
    )


def _tiles(config: RunConfig, history: History) -> list[tuple[str, str]]:
    rows = _iterations(history)
    if not rows:
        return []
    held_out = _known(history, "evaluate/accuracy")
    seconds = [row["generate/seconds"] + row["carry/seconds"] + row["train/seconds"] for row in rows]
    return [
        (f"{len(rows)} / {config.iterations}", "iterations"),
        (number(rows[-1]["carry/reward"], "+.3f"), "reward, newest"),
        (number(held_out[-1] if held_out else math.nan, ".3f"), "held-out accuracy, newest"),
        (f"{np.median(_known(rows, 'generate/tokens_per_second')):,.0f}", "tokens/s sampled, median"),
        (f"{np.median(seconds):,.1f} s", "an iteration, median"),
        (f"{rows[-1]['carry/off_policy_share']:.0%}", "of the newest batch off-policy"),
    ]


def _named_charts(history: History) -> list[Chart]:
    """Charts of what only this recipe measures: held-out sets, pass@k, maj@k, parts of the reward."""
    names = sorted({name for row in history for name in row}, key=_by_number)
    kinds = {
        "Accuracy of each held-out set": r"evaluate/([^/]+)/accuracy",
        "pass@k": r"evaluate/(pass@\d+)",
        "maj@k": r"evaluate/(maj@\d+)",
        "Parts of the reward": r"reward/(.+)",
    }
    found = {
        title: tuple((name, match[1]) for name in names if (match := re.fullmatch(form, name)))
        for title, form in kinds.items()
    }
    return [Chart(title, lines) for title, lines in found.items() if lines]


def _by_number(name: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _lines(chart: Chart, history: History) -> list[tuple[str, list[float], list[float]]]:
    lines = []
    for name, label in chart.lines:
        points = [(row["iteration"], row[name]) for row in history if math.isfinite(row.get(name, math.nan))]
        if points and not (chart.kind == "log" and max(y for _, y in points) <= 0):
            x, y = zip(*points, strict=True)
            lines.append((label, list(x), list(y)))
    return lines


def _draw(chart: Chart, lines: list[tuple[str, list[float], list[float]]]) -> str:
    unit = describe(chart.lines[0][0]).unit
    paint: Paint = (
        stacked("iteration", unit, lines)
        if chart.kind == "stacked"
        else curves("iteration", unit, lines, log=chart.kind == "log")
    )
    return figure(chart.title, paint)


def _metric_table(history: History) -> str:
    rows = []
    others = sorted({name for row in history for name in row} - METRICS.keys(), key=_by_number)
    for name in (*METRICS, *others):
        values, metric = _known(history, name), describe(name)
        if values and metric is not None and name != "iteration":
            rows.append(
                (name, metric.unit, metric.meaning, number(values[-1]), number(min(values)), number(max(values)))
            )
    return table(("metric", "unit", "meaning", "newest", "least", "greatest"), rows, numeric=3)


def _iterations(history: History) -> list[dict[str, float]]:
    """Without the row after the last iteration, which holds an evaluation only."""
    return [row for row in history if "carry/reward" in row]


def _known(history: History, name: str) -> list[float]:
    return [row[name] for row in history if math.isfinite(row.get(name, math.nan))]

"""The report of a run: `metrics.parquet` (one row an iteration) and `report.html` (pictures of it, self-contained)."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.config import RunConfig


@dataclass(frozen=True)
class Figure:
    """One picture: curves over iterations, each a metric's name and its legend."""

    title: str
    unit: str
    curves: tuple[tuple[str, str], ...]


FIGURES = (
    Figure("Reward", "mean of scored responses", (("carry/reward", "reward"),)),
    Figure("Accuracy", "share right", (("carry/accuracy", "training prompts"), ("evaluate/accuracy", "held-out"))),
    Figure(
        "Response length", "tokens", (("carry/response_tokens", "scored"), ("carry/trained_response_tokens", "trained"))
    ),
    Figure(
        "Groups",
        "per iteration",
        (
            ("ledger/groups_trained", "trained"),
            ("ledger/groups_filtered", "filtered"),
            ("ledger/groups_carried_out", "carried"),
        ),
    ),
    Figure(
        "Off-policy",
        "share of trained tokens",
        (("carry/off_policy_share", "older weights"), ("carry/resumed_share", "cut and resumed")),
    ),
    Figure(
        "Staleness", "weight versions", (("carry/mean_version_lag", "mean lag"), ("carry/max_version_lag", "max lag"))
    ),
    Figure("Throughput", "tokens/s of generate", (("generate/tokens_per_second", "sampled"),)),
    Figure(
        "Time",
        "seconds per stage",
        (("generate/seconds", "generate"), ("carry/seconds", "carry-over"), ("train/seconds", "train")),
    ),
    Figure("Entropy", "nats per token", (("train/entropy", "policy"),)),
    Figure(
        "Clipping", "share of tokens", (("train/clip_fraction", "clipped"), ("train/dual_clip_fraction", "dual clip"))
    ),
    Figure(
        "Engine and trainer",
        "mean |log-prob difference|",
        (("train/logprob_difference_fresh", "fresh tokens"), ("train/logprob_difference_stale", "stale tokens")),
    ),
    Figure("Gradient norm", "before clipping", (("train/gradient_norm", "mean over updates"),)),
)

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(360px, 1fr)); gap: 1rem; }}
svg {{ width: 100%; height: auto; }}
svg text {{ fill: currentColor; }}
pre {{ overflow-x: auto; font-size: 12px; }}
</style></head><body><h1>{title}</h1><p>{summary}</p><div class="figures">{figures}</div>
<h2>Recipe</h2><pre>{recipe}</pre></body></html>
"""


def write_report(config: RunConfig, history: Sequence[dict[str, float]]) -> None:
    """Write `metrics.parquet` and `report.html` into the run's directory."""
    names = sorted({name for row in history for name in row})
    table = pa.table({name: pa.array([row.get(name) for row in history], pa.float64()) for name in names})
    with fsspec.open(f"{config.run_directory}/metrics.parquet", "wb") as file:
        pq.write_table(table, file)
    page = PAGE.format(
        title=html.escape(f"Run {config.name}"),
        summary=html.escape(summary(history)),
        figures="".join(draw_figure(figure, history) for figure in FIGURES),
        recipe=html.escape(config.model_dump_json(indent=2)),
    )
    with fsspec.open(f"{config.run_directory}/report.html", "wb") as file:
        file.write(page.encode())


def summary(history: Sequence[dict[str, float]]) -> str:
    """The run in a sentence or two."""
    held_out = [row["evaluate/accuracy"] for row in history if "evaluate/accuracy" in row]
    trained = [row for row in history if "carry/reward" in row]
    parts = [f"{len(trained)} iterations"]
    if len(held_out) > 1:
        parts.append(f"held-out accuracy from {held_out[0]:.3f} to {held_out[-1]:.3f}")
    if trained:
        tokens = sum(row["ledger/tokens_trained"] + row["ledger/tokens_masked"] for row in trained)
        resumed = sum(
            row["carry/resumed_share"] * (row["ledger/tokens_trained"] + row["ledger/tokens_masked"]) for row in trained
        )
        parts.append(f"{resumed / max(tokens, 1):.0%} of the trained tokens from responses that were cut and resumed")
        parts.append(
            f"{np.median([row['generate/tokens_per_second'] for row in trained]):,.0f} tokens/s sampled (median)"
        )
    return "; ".join(parts)


def draw_figure(figure: Figure, history: Sequence[dict[str, float]]) -> str:
    """One picture as inline SVG; the colours of axes and text follow the page's light or dark scheme."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": figure.title, "font.size": 9}):
        drawn, axes = pyplot.subplots(figsize=(4.2, 2.6), layout="constrained")
        for name, label in figure.curves:
            points = [(row["iteration"], row[name]) for row in history if name in row]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, marker="." if len(points) < 60 else "")
        axes.set_title(figure.title)
        axes.set_ylabel(figure.unit)
        axes.set_xlabel("iteration")
        axes.spines[["top", "right"]].set_visible(False)
        if len(axes.lines) > 1:
            axes.legend(frameon=False)
        sink = io.StringIO()
        drawn.savefig(sink, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(drawn)
    svg = sink.getvalue()
    return svg[svg.index("<svg") :].replace("#000000", "currentColor")

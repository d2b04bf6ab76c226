"""Pictures of single stages, as the inside of a page: a Flyte deck, and `decks/0007/<stage>.html` of the run.

Each is bounded in size, whatever the batch: timelines leave out slots, texts their middle, and both say so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flytekit import Deck

from tasks.config import RunConfig
from tasks.report.page import (
    AMBER,
    BLUE,
    COLOURS,
    GREY,
    RED,
    body,
    curves,
    escape,
    figure,
    figures,
    heading,
    number,
    page,
    paragraph,
    table,
)
from tasks.report.timeline import Stay, Timeline
from tasks.storage import write_file
from tasks.trajectory import Trajectory, segment_texts

MAX_BARS = 4000
MAX_SLOTS = 128
MAX_CHARACTERS = 3000
MAX_SEGMENTS = 20
TRAJECTORIES_PER_KIND = 3

Decode = Callable[[Sequence[int]], str]


def publish_deck(config: RunConfig, stage: str, iteration: int, content: str) -> None:
    """Show a stage's pictures in the Flyte console, and keep them with the run."""
    Deck(stage, content)
    title = f"{config.name}: {stage} {iteration}"
    write_file(f"{config.run_directory}/decks/{iteration:04d}/{stage}.html", page(title, content).encode())


def generate_deck(
    timeline: Timeline,
    rows: Sequence[Trajectory],
    version: int,
    reason: str,
    decode: Decode,
    metrics: Mapping[str, float],
) -> str:
    """What a generate stage did: every slot of the engine over time, lengths, and some trajectories with their text.

    `rows`: all trajectories as they stood at the cut.
    """
    cut = sum(stay.end == "cut" for stay in timeline.stays)
    return body(
        heading("Generate", 1),
        paragraph(
            f"Weights of version {version}. Cut because {reason}: {len(timeline.stays)} trajectories were in the "
            f"engine, {len(timeline.stays) - cut} ended and {cut} were cut. "
            f"{metrics['generate/tokens']:,.0f} tokens in {metrics['generate/sampling_seconds']:.1f} s."
        ),
        heading("Every slot of the engine"),
        _timeline(timeline, version),
        figures(
            (
                figure("Trajectories in flight", _in_flight(timeline)),
                figure("Response length", _lengths(rows), caption="so far, for those that were cut"),
            )
        ),
        heading("Trajectories"),
        paragraph("Each run of tokens is coloured by the weight version that sampled it."),
        trajectory_table(rows, decode),
    )


def _timeline(timeline: Timeline, version: int) -> str:
    """A bar for each stay of a trajectory in a slot; hovering names it."""
    stays = timeline.stays
    if not stays:
        return paragraph("Nothing was in the engine.")
    shown = min(timeline.slots, MAX_SLOTS)
    while sum(stay.slot < shown for stay in stays) > MAX_BARS and shown > 1:
        shown //= 2
    end = max(stay.left for stay in stays) or 1.0
    width, row, top = 1180.0, max(3.0, min(12.0, 560.0 / shown)), 4.0
    bars = []
    for stay in stays:
        if stay.slot >= shown:
            continue
        left, right = width * stay.entered / end, width * stay.left / end
        colour = _lag_colour(version - stay.segments[0].version if stay.segments else 0)
        y = top + stay.slot * row
        bars.append(
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{max(right - left - 0.6, 0.4):.1f}" height="{row * 0.85:.1f}" '
            f'fill="{colour}"><title>{escape(_describe(stay))}</title></rect>'
        )
        if stay.end == "cut":
            bars.append(f'<rect x="{right - 2.5:.1f}" y="{y:.1f}" width="2.5" height="{row * 0.85:.1f}" fill="{RED}"/>')
    height = top + shown * row
    ticks = "".join(
        f'<text x="{width * share:.0f}" y="{height + 14:.0f}" font-size="11" '
        f'text-anchor="{anchor}">{end * share:.3g} s</text>'
        for share, anchor in ((0, "start"), (0.25, "middle"), (0.5, "middle"), (0.75, "middle"), (1, "end"))
    )
    lags = sorted({version - stay.segments[0].version for stay in stays if stay.segments})
    legend = "".join(
        f'<span style="color:{_lag_colour(lag)}">■</span> '
        f"{'new' if lag == 0 else f'first token {lag} versions old'} &nbsp; "
        for lag in lags[:6]
    )
    left_out = "" if shown == timeline.slots else f" Shown are the first {shown} of {timeline.slots} slots."
    return (
        f'<svg viewBox="0 0 {width:.0f} {height + 20:.0f}" class="timeline" role="img" '
        f'aria-label="timeline of the engine\'s slots">{"".join(bars)}{ticks}</svg>'
        f'<p>{legend}<span style="color:{RED}">▌</span> cut, to be continued.{left_out}</p>'
    )


def _lag_colour(lag: int) -> str:
    return BLUE if lag == 0 else (AMBER, "#d97706", "#b45309", "#92400e")[min(lag, 4) - 1]


def _describe(stay: Stay) -> str:
    versions = (
        ", ".join(f"{segment.length} by version {segment.version}" for segment in stay.segments) or "no token yet"
    )
    return (
        f"{stay.group_id} member {stay.member}: {stay.kept} tokens kept, {stay.sampled} sampled here ({versions}); "
        f"{'cut' if stay.end == 'cut' else 'ended by ' + stay.end} at {stay.left:.2f} s"
    )


def _in_flight(timeline: Timeline) -> Callable[[Any], None]:
    curve = timeline.in_flight()
    curve = curve[:: max(1, len(curve) // 1000)]

    def paint(axes: Any) -> None:
        axes.step([seconds for seconds, _ in curve], [level for _, level in curve], where="post", color=BLUE)
        axes.set_xlabel("seconds")
        axes.set_ylim(bottom=0)

    return paint


def _lengths(rows: Sequence[Trajectory]) -> Callable[[Any], None]:
    ended = [row.tokens for row in rows if row.finish_reason is not None]
    partial = [row.tokens for row in rows if row.finish_reason is None and row.tokens]

    def paint(axes: Any) -> None:
        longest = max([*ended, *partial, 2])
        bins = np.unique(np.geomspace(1, longest + 1, 30).round())
        axes.hist([ended, partial], bins=bins, stacked=True, color=[BLUE, AMBER], label=["ended", "cut"])
        axes.set_xscale("log")
        axes.set_xlabel("tokens")
        axes.set_ylabel("responses")
        axes.legend(frameon=False, fontsize=8)

    return paint


def trajectory_table(rows: Sequence[Trajectory], decode: Decode) -> str:
    """The best, worst, longest and most often cut trajectories, each with its text coloured by weight version."""
    scored = [row for row in rows if row.reward is not None]
    sampled = [row for row in rows if row.tokens]
    kinds = (
        ("highest reward", sorted(scored, key=lambda row: -row.reward)),
        ("lowest reward", sorted(scored, key=lambda row: row.reward)),
        ("longest", sorted(sampled, key=lambda row: -row.tokens)),
        ("cut most often", sorted(sampled, key=lambda row: (-row.resumes, -len(row.segments)))),
    )
    lines = []
    for kind, ordered in kinds:
        for row in ordered[:TRAJECTORIES_PER_KIND]:
            facts = (
                f"{row.group_id} member {row.member}",
                f"{row.status}, {row.tokens} tokens, resumed {row.resumes} times",
                f"reward {number(row.reward, '+.2f')}, accuracy {number(row.accuracy, '.2f')}",
            )
            lines.append(
                f"<tr><td>{escape(kind)}</td><td>{'<br>'.join(map(escape, facts))}</td>"
                f'<td><div class="text"><b>{escape(_shortened(decode(row.prompt_tokens.tolist())))}</b>'
                f"{_coloured(row, decode)}</div></td></tr>"
            )
    return f'<div class="wide"><table><tbody>{"".join(lines)}</tbody></table></div>'


def _coloured(row: Trajectory, decode: Decode) -> str:
    """The response's text, a span for each weight version."""
    limit = max(100, MAX_CHARACTERS // max(len(row.segments), 1))
    spans = [
        f'<span style="border-bottom:2px solid {COLOURS[segment.version % len(COLOURS)]}" '
        f'title="version {segment.version}, {segment.length} tokens">{escape(_shortened(text, limit))}</span>'
        for segment, text in itertools.islice(segment_texts(row, decode), MAX_SEGMENTS)
    ]
    if len(row.segments) > MAX_SEGMENTS:
        spans.append(f" … {len(row.segments) - MAX_SEGMENTS} further segments")
    return "".join(spans)


def _shortened(text: str, limit: int = MAX_CHARACTERS) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} … {len(text) - limit:,} characters … {text[-limit // 2 :]}"


def carry_over_deck(metrics: Mapping[str, float]) -> str:
    """Where groups and tokens came from and went, as the ledger has it."""
    return body(
        heading("Carry over", 1),
        paragraph("What came in, on the left, is as much as what became of it, on the right: the ledger is checked."),
        figures(figure(kind.capitalize(), _flow(metrics, kind), size=(5.4, 3.6)) for kind in ("groups", "tokens")),
        heading("The ledger"),
        table(
            ("account", "groups", "tokens"),
            [
                (name.replace("_", " "), *(f"{metrics[f'ledger/{kind}_{name}']:,.0f}" for kind in ("groups", "tokens")))
                for name in (*_IN, *_OUT)
            ],
        ),
    )


_IN = {"carried_in": AMBER, "entered": BLUE}
_OUT = {
    "trained": BLUE,
    "masked": "#1e3a8a",
    "filtered": GREY,
    "failed": RED,
    "discarded": "#7f1d1d",
    "carried_out": AMBER,
}


def _flow(metrics: Mapping[str, float], kind: str) -> Callable[[Any], None]:
    entered = {"groups": "drawn", "tokens": "generated"}[kind]

    def paint(axes: Any) -> None:
        for x, accounts in ((0, _IN), (1, _OUT)):
            base = 0.0
            for name, colour in accounts.items():
                amount = metrics[f"ledger/{kind}_{name}"]
                if not amount:
                    continue
                axes.bar(x, amount, 0.5, bottom=base, color=colour, alpha=0.85)
                label = entered if name == "entered" else name.replace("_", " ")
                axes.annotate(f"{label} {amount:,.0f}", (x + 0.27, base + amount / 2), va="center", fontsize=8)
                base += amount
        axes.set_xlim(-0.4, 1.9)
        axes.set_xticks([0, 1], ["came in", "became"])
        axes.spines["bottom"].set_visible(False)

    return paint


def train_deck(updates: Sequence[Mapping[str, float]], metrics: Mapping[str, float]) -> str:
    """Every update of a train stage. `updates`: what each measured, in order."""
    shown = (
        ("loss", "Loss", ""),
        ("gradient_norm", "Gradient norm", ""),
        ("entropy", "Entropy", "nats per token"),
        ("kl", "Divergence from the policy before the stage", "nats per token"),
        ("clip_fraction", "Clipped", "share of tokens"),
        ("importance_weight", "Importance weight", ""),
    )
    numbers = list(range(1, len(updates) + 1))
    return body(
        heading("Train", 1),
        paragraph(
            f"{metrics.get('train/updates', 0):.0f} updates in {metrics.get('train/seconds', 0):.1f} s, "
            f"{metrics.get('train/skipped_updates', 0):.0f} skipped; "
            f"{metrics.get('train/trained_tokens', 0):,.0f} tokens trained, "
            f"{metrics.get('train/off_policy_share', 0):.0%} of them off-policy."
        ),
        figures(
            figure(title, curves("update", unit, [(title, numbers, [update[name] for update in updates])]))
            for name, title, unit in shown
            if updates
        ),
        table(("metric", "value"), [(name, number(value)) for name, value in sorted(metrics.items())]),
    )

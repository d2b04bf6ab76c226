"""The building blocks of every page: one self-contained HTML file, light and dark, pictures as inline SVG.

Nothing in a page is fetched from anywhere, and every text that comes from data goes through `escape`.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

BLUE, RED, AMBER, GREEN, VIOLET, GREY = "#3b82f6", "#ef4444", "#f59e0b", "#16a34a", "#a855f7", "#8b95a1"
COLOURS = (BLUE, AMBER, GREEN, VIOLET, RED, GREY)

Paint = Callable[[Any], None]
"""Draws on matplotlib axes."""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,"><title>{title}</title></head><body>{body}</body></html>
"""

_STYLE = """<style>
:root { color-scheme: light dark; }
.co { font: 15px/1.5 system-ui, sans-serif; max-width: 1240px; margin: 0 auto; padding: 1rem; }
.co h1 { font-size: 1.5rem; margin: .5rem 0; } .co h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
.co .figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: .8rem; }
.co figure { margin: 0; } .co figcaption { font-size: .8rem; opacity: .7; padding: 0 .5rem; }
.co svg { width: 100%; height: auto; } .co svg text { fill: currentColor; }
.co table { border-collapse: collapse; font-size: .85rem; } .co .wide { overflow-x: auto; }
.co th, .co td { padding: .2rem .7rem; text-align: left; vertical-align: top; border-bottom: 1px solid #8b95a144; }
.co td.n, .co th.n { text-align: right; font-variant-numeric: tabular-nums; }
.co .tiles { display: flex; flex-wrap: wrap; gap: .6rem; }
.co .tile { border: 1px solid #8b95a166; border-radius: .5rem; padding: .4rem .9rem; }
.co .tile b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.co .tile span { font-size: .8rem; opacity: .75; }
.co .fine::before { content: "✓ "; color: #16a34a; } .co .look::before { content: "⚠ "; color: #f59e0b; }
.co ul { list-style: none; padding: 0; margin: .3rem 0; }
.co pre, .co .text { font: 12px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.co .text { max-width: 60rem; max-height: 16rem; overflow-y: auto; }
</style>"""

escape = html.escape


def body(*parts: str) -> str:
    """The inside of a page, with its style: what a Flyte deck takes."""
    return f'{_STYLE}<div class="co">{"".join(parts)}</div>'


def page(title: str, content: str) -> str:
    """A complete HTML file around a `body`."""
    return _PAGE.format(title=escape(title), body=content)


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """Large figures with what they mean below."""
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in values
        )
        + "</div>"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numeric: int = 1) -> str:
    """Cells are text and are escaped; those from column `numeric` on are numbers, set to the right."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if number >= numeric else ''}>{escape(str(cell))}</{tag}>"
            for number, cell in enumerate(row)
        )

    lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="wide"><table><thead><tr>{cells("th", columns)}</tr></thead><tbody>{lines}</tbody></table></div>'
    )


def figures(pictures: Iterable[str]) -> str:
    return f'<div class="figures">{"".join(pictures)}</div>'


def figure(title: str, paint: Paint, *, caption: str = "", size: tuple[float, float] = (4.4, 2.7)) -> str:
    """A picture as inline SVG; axes and text follow the page's light or dark scheme. `size`: in inches."""
    legend = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{picture(title, paint, size, 'svg').decode()}{legend}</figure>"


def picture(title: str, paint: Paint, size: tuple[float, float], form: str) -> bytes:
    """The same as a file: `svg` with text as text and transparent ground, or `png` on white."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings = {"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 9, "axes.prop_cycle": _cycle()}
    with rc_context(settings):
        drawn = Figure(figsize=size)
        drawn.subplots_adjust(
            left=0.66 / size[0], right=1 - 0.1 / size[0], top=1 - 0.3 / size[1], bottom=0.45 / size[1]
        )
        axes = drawn.subplots()
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
        paint(axes)
        sink = io.BytesIO()
        if form == "png":
            drawn.savefig(sink, format="png", dpi=200, metadata={"Software": None})
            return sink.getvalue()
        drawn.savefig(sink, format="svg", transparent=True, metadata={"Date": None})
    text = sink.getvalue().decode()
    return text[text.index("<svg") :].replace("#000000", "currentColor").encode()


def _cycle() -> Any:
    from cycler import cycler

    return cycler(color=COLOURS)


def curves(
    x_label: str, unit: str, lines: Sequence[tuple[str, Sequence[float], Sequence[float]]], **options: Any
) -> Paint:
    """Lines (label, x, y) on common axes. Long ones are drawn faint with their running mean on top."""

    def paint(axes: Any) -> None:
        for number, (label, x, y) in enumerate(lines):
            colour = options.get("colours", COLOURS)[number]
            if len(x) < 80:
                axes.plot(x, y, label=label, color=colour, marker=".", markersize=4, linewidth=1.4)
                continue
            axes.plot(x, y, color=colour, alpha=0.3, linewidth=0.7)
            axes.plot(x, running_mean(y, len(y) // 40), label=label, color=colour, linewidth=1.4)
        _label(axes, x_label, unit)
        if options.get("log"):
            axes.set_yscale("log")
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=8)

    return paint


def stacked(x_label: str, unit: str, lines: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> Paint:
    """Areas (label, x, y) on top of each other, all with the same x."""

    def paint(axes: Any) -> None:
        used = [line for line in lines if any(line[2])]
        if used:
            labels, x, y = [line[0] for line in used], used[0][1], [line[2] for line in used]
            axes.stackplot(x, y, labels=labels, alpha=0.8, step="mid" if len(x) < 80 else None)
            axes.legend(frameon=False, fontsize=8)
        _label(axes, x_label, unit)

    return paint


def _label(axes: Any, x_label: str, unit: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel("" if unit == "1" else unit)
    axes.ticklabel_format(axis="y", scilimits=(-3, 5))


def running_mean(values: Sequence[float], window: int) -> np.ndarray:
    """Centred mean over `2 * window + 1` values, fewer at the ends; what is not a number is left out."""
    known = np.isfinite(values)
    sums = np.cumsum(np.concatenate([[0.0], np.where(known, values, 0.0)]))
    counts = np.cumsum(np.concatenate([[0], known]))
    centre = np.arange(len(values))
    low, high = np.maximum(centre - window, 0), np.minimum(centre + window + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (sums[high] - sums[low]) / np.maximum(counts[high] - counts[low], 1)


def number(value: float, form: str = ",.3g") -> str:
    return "–" if value is None or not math.isfinite(value) else format(value, form)

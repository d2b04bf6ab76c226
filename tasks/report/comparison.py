"""What partial rollout gains, from runs of several arms with several seeds: tables, figures, statistical statements.

    <output>/<name>-compare/comparison.html      figures and tables, self-contained
    <output>/<name>-compare/figures/*.svg, *.png the figures as files
    <output>/<name>-compare/iterations.parquet   every metric of every iteration, with arm and seed
    <output>/<name>-compare/responses.parquet    every response that was trained on, filtered or discarded
    <output>/<name>-compare/summary.json         the table's values for each arm and seed

Steady iterations are those after the first `compare.warm_up`. An iteration's time is that of its three stages, without
the start of an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.config import RunConfig
from tasks.report.page import (
    AMBER,
    BLUE,
    GREEN,
    RED,
    VIOLET,
    Paint,
    body,
    escape,
    figure,
    figures,
    heading,
    page,
    paragraph,
    picture,
    table,
)
from tasks.report.report import metrics_table
from tasks.storage import read_metrics, write_file, write_json, write_table

ARM_COLOURS = (BLUE, RED, AMBER, GREEN, VIOLET)


@dataclass(frozen=True)
class ArmRun:
    """One run of the comparison: its metrics by iteration, and its responses (see carry_over's RESPONSE_SCHEMA)."""

    arm: str
    seed: int
    history: list[dict[str, float]]
    responses: pa.Table

    @property
    def iterations(self) -> list[dict[str, float]]:
        return [row for row in self.history if "carry/reward" in row]

    def seconds(self) -> np.ndarray:
        """Seconds of each iteration, the start of an engine in the first one left out."""
        rows = self.iterations
        seconds = [row["generate/seconds"] + row["carry/seconds"] + row["train/seconds"] for row in rows]
        seconds[0] -= rows[0]["generate/engine_seconds"]
        return np.array(seconds)


@dataclass(frozen=True)
class Quantity:
    """A row of the table: one number for each run."""

    name: str
    form: str
    of: Callable[[ArmRun, list[dict[str, float]]], float]  # of a run and its steady iterations
    as_ratio: bool = False

    def value(self, config: RunConfig, run: ArmRun) -> float:
        """NaN for a run that had no steady iteration, or sampled nothing in them."""
        rows = steady(config, run)
        try:
            return self.of(run, rows) if rows else math.nan
        except ZeroDivisionError:
            return math.nan


def _total(rows: Sequence[Mapping[str, float]], *names: str) -> float:
    return float(sum(row[name] for row in rows for name in names))


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    known = [row[name] for row in rows if math.isfinite(row[name])]
    return float(np.mean(known)) if known else math.nan


def _mean_over_trained(rows: Sequence[Mapping[str, float]], name: str) -> float:
    """Mean of a metric of batches, over their tokens."""
    return sum(row[name] * _trained([row]) for row in rows) / _trained(rows)


def _trained(rows: Sequence[Mapping[str, float]]) -> float:
    return _total(rows, "ledger/tokens_trained", "ledger/tokens_masked")


def _final_accuracy(run: ArmRun, _rows: Any) -> float:
    found = [row["evaluate/accuracy"] for row in run.history if "evaluate/accuracy" in row]
    return found[-1] if found else math.nan


QUANTITIES = (
    Quantity(
        "trained-response tokens per second of generate",
        ",.0f",
        lambda _, rows: _trained(rows) / _total(rows, "generate/seconds"),
        as_ratio=True,
    ),
    Quantity(
        "sampled tokens per second of sampling",
        ",.0f",
        lambda _, rows: _total(rows, "generate/tokens") / _total(rows, "generate/sampling_seconds"),
        as_ratio=True,
    ),
    Quantity(
        "sampling latency of an iteration, median, s",
        ".2f",
        lambda _, rows: float(np.median([row["generate/seconds"] for row in rows])),
        as_ratio=True,
    ),
    Quantity(
        "sampling latency of an iteration, 95th percentile, s",
        ".2f",
        lambda _, rows: float(np.percentile([row["generate/seconds"] for row in rows], 95)),
        as_ratio=True,
    ),
    Quantity(
        "time of an iteration, mean, s",
        ".2f",
        lambda run, rows: float(np.mean(run.seconds()[-len(rows) :])),
        as_ratio=True,
    ),
    Quantity("mean reward", "+.3f", lambda _, rows: _mean(rows, "carry/reward")),
    Quantity("held-out accuracy at the end", ".3f", _final_accuracy),
    Quantity("tokens trained per iteration", ",.0f", lambda _, rows: _trained(rows) / len(rows)),
    Quantity("response length trained, mean", ".1f", lambda _, rows: _mean(rows, "carry/trained_response_tokens")),
    Quantity(
        "discarded tokens, share of sampled",
        ".1%",
        lambda _, rows: _total(rows, "ledger/tokens_discarded") / _total(rows, "generate/tokens"),
    ),
    Quantity(
        "tokens prefilled once more, per sampled token",
        ".1%",
        lambda _, rows: _total(rows, "generate/reprefilled_tokens") / _total(rows, "generate/tokens"),
    ),
    Quantity(
        "off-policy share of trained tokens", ".1%", lambda _, rows: _mean_over_trained(rows, "carry/off_policy_share")
    ),
    Quantity(
        "mean lag of trained tokens, versions",
        ".2f",
        lambda _, rows: _mean_over_trained(rows, "carry/mean_version_lag"),
    ),
    Quantity(
        "greatest lag of a trained token, versions",
        ".0f",
        lambda _, rows: max(row["carry/max_version_lag"] for row in rows),
    ),
)


_QUANTITY = {quantity.name: quantity for quantity in QUANTITIES}


def read_arm(arm: str, seed: int, run_directory: str) -> ArmRun:
    """A finished run of the comparison, from its directory."""
    filesystem, root = fsspec.core.url_to_fs(f"{run_directory}/responses")
    files = sorted(filesystem.glob(f"{root}/*.parquet"))
    tables = [pq.read_table(pa.BufferReader(content)) for _, content in sorted(filesystem.cat(files).items())]
    return ArmRun(arm, seed, read_metrics(run_directory), pa.concat_tables(tables))


def write_comparison(config: RunConfig, directory: str, runs: Sequence[ArmRun]) -> str:
    """Write everything that the comparison found into `directory`; returns the body of its page, for a deck."""
    write_table(f"{directory}/iterations.parquet", _with_arms(runs, lambda run: metrics_table(run.history)))
    write_table(f"{directory}/responses.parquet", _with_arms(runs, lambda run: run.responses))
    write_json(f"{directory}/summary.json", {"runs": summaries(config, runs), "statements": statements(config, runs)})
    drawn = _figures(config, runs)
    for name, (title, paint, _) in drawn.items():
        for form in ("svg", "png"):
            write_file(f"{directory}/figures/{name}.{form}", picture(title, paint, (5.2, 3.2), form))
    content = body(
        heading(f"{config.name}: partial rollout on and off", 1),
        paragraph(_conditions(config, runs)),
        "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in statements(config, runs)) + "</ul>",
        comparison_table(config, runs),
        figures(figure(title, paint, caption=caption, size=(5.2, 3.2)) for title, paint, caption in drawn.values()),
    )
    write_file(f"{directory}/comparison.html", page(f"{config.name}: comparison", content).encode())
    return content


def _with_arms(runs: Sequence[ArmRun], of: Callable[[ArmRun], pa.Table]) -> pa.Table:
    tables = []
    for run in runs:
        part = of(run)
        part = part.append_column("arm", pa.array([run.arm] * part.num_rows))
        tables.append(part.append_column("seed", pa.array([run.seed] * part.num_rows, pa.int64())))
    return pa.concat_tables(tables, promote_options="default")


def _conditions(config: RunConfig, runs: Sequence[ArmRun]) -> str:
    seeds = sorted({run.seed for run in runs})
    return (
        f"{len(runs[0].iterations)} iterations of {config.updates_per_iteration} updates in each of {len(runs)} runs: "
        f"every arm with seeds {', '.join(map(str, seeds))}, the same prompts, settings and engine. The first "
        f"{config.compare.warm_up} iterations are left out of the table. ± is the standard deviation over seeds."
    )


def steady(config: RunConfig, run: ArmRun) -> list[dict[str, float]]:
    """The iterations after the warm-up, those without a batch included: their time and tokens count."""
    return run.iterations[config.compare.warm_up :]


def summaries(config: RunConfig, runs: Sequence[ArmRun]) -> list[dict[str, Any]]:
    """Every quantity of every run."""
    return [{"arm": run.arm, "seed": run.seed} | {q.name: q.value(config, run) for q in QUANTITIES} for run in runs]


def _by_arm(runs: Sequence[ArmRun]) -> dict[str, list[ArmRun]]:
    """Runs of each arm, ordered by seed; arms in the order of the recipe."""
    arms: dict[str, list[ArmRun]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        arms.setdefault(run.arm, []).append(run)
    order = list(dict.fromkeys(run.arm for run in runs))
    return {arm: arms[arm] for arm in order}


def comparison_table(config: RunConfig, runs: Sequence[ArmRun]) -> str:
    """Mean ± standard deviation over seeds for each arm; ratios are of the first arm to the other, seed by seed."""
    rows = []
    for quantity in QUANTITIES:
        values = {arm: [quantity.value(config, run) for run in members] for arm, members in _by_arm(runs).items()}
        first = next(iter(values.values()))
        cells = []
        for arm, found in values.items():
            spread = f" ± {format(float(np.std(found, ddof=1)), quantity.form.lstrip('+'))}" if len(found) > 1 else ""
            ratio = ""
            if quantity.as_ratio and arm != next(iter(values)):
                ratio = f" (× {np.mean(np.array(first) / np.array(found)):.2f})"
            cells.append(f"{format(float(np.mean(found)), quantity.form)}{spread}{ratio}")
        rows.append((quantity.name, *cells))
    note = paragraph("(× r): the first arm's value divided by this one's, mean over seeds.")
    return table(("over steady iterations", *_by_arm(runs)), rows) + note


def statements(config: RunConfig, runs: Sequence[ArmRun]) -> list[str]:
    """Whether reward and held-out accuracy differ between the first arm and each other, and whether lengths do."""
    arms = _by_arm(runs)
    first, *others = arms
    lines = []
    measures = (
        ("mean reward over steady iterations", _QUANTITY["mean reward"]),
        ("held-out accuracy at the end", _QUANTITY["held-out accuracy at the end"]),
    )
    for other in others:
        for name, quantity in measures:
            result = _welch(*([quantity.value(config, run) for run in arms[arm]] for arm in (first, other)))
            lines.append(f"{name}, {first} against {other}: {result}")
    unbiased = next((arm for arm in arms if not _arm_setting(config, arm, "enabled", True)), None)
    if unbiased is not None:
        reference = scored_lengths(config, arms[unbiased])
        lines += [
            _length_statement(arm, scored_lengths(config, members), unbiased, reference)
            for arm, members in arms.items()
            if arm != unbiased
        ]
    return lines


def _arm_setting(config: RunConfig, arm: str, name: str, default: Any) -> Any:
    return config.compare.arms.get(arm, {}).get("partial_rollout", {}).get(name, default)


def _welch(one: Sequence[float], other: Sequence[float]) -> str:
    from scipy.stats import ttest_ind

    difference = float(np.mean(one) - np.mean(other))
    if min(len(one), len(other)) < 2 or not np.isfinite([*one, *other]).all():
        return f"difference {difference:+.3f}; with fewer than two values for each there is no test"
    test = ttest_ind(one, other, equal_var=False)
    low, high = test.confidence_interval(0.95)
    differ = "differ" if test.pvalue < 0.05 else "do not differ detectably"
    return (
        f"they {differ}: {difference:+.3f}, 95 % interval {low:+.3f} to {high:+.3f}, p = {test.pvalue:.2g} "
        f"(Welch's t-test, two-sided, over {len(one)} and {len(other)} seeds)"
    )


def scored_lengths(config: RunConfig, runs: Sequence[ArmRun]) -> np.ndarray:
    """Lengths of the responses of every group that was decided on in steady iterations, before the filter."""
    parts = [
        run.responses.filter(
            pc.and_(
                pc.greater_equal(run.responses["iteration"], config.compare.warm_up),
                pc.is_in(run.responses["outcome"], pa.array(["trained", "filtered"])),
            )
        )["tokens"].to_numpy()
        for run in runs
    ]
    return np.concatenate(parts)


def _length_statement(arm: str, lengths: np.ndarray, unbiased: str, reference: np.ndarray) -> str:
    from scipy.stats import ks_2samp

    if not len(lengths) or not len(reference):
        return f"response lengths, {arm} against {unbiased}: an arm had no ready group in its steady iterations"
    distance = ks_2samp(lengths, reference).statistic
    return (
        f"response lengths, {arm} against {unbiased} (which waits for every response and so is unbiased): mean "
        f"{lengths.mean():.1f} against {reference.mean():.1f}, 95th percentile {np.percentile(lengths, 95):.0f} "
        f"against {np.percentile(reference, 95):.0f}, Kolmogorov–Smirnov distance {distance:.3f} ({len(lengths):,} and "
        f"{len(reference):,} responses of ready groups, before the filter)"
    )


def _figures(config: RunConfig, runs: Sequence[ArmRun]) -> dict[str, tuple[str, Paint, str]]:
    """Each figure's file name, title, drawing and caption."""
    arms = _by_arm(runs)
    colours = dict(zip(arms, ARM_COLOURS, strict=False))
    against_time = "seconds of generate, carry-over and train"

    def bands(name: str, unit: str, by_time: bool = False) -> Paint:
        def paint(axes: Any) -> None:
            for arm, members in arms.items():
                grid, values = _on_common_grid(members, name, by_time)
                if not len(grid):
                    continue
                axes.plot(grid, values.mean(axis=0), color=colours[arm], label=arm, linewidth=1.6)
                axes.fill_between(
                    grid, values.min(axis=0), values.max(axis=0), color=colours[arm], alpha=0.18, linewidth=0
                )
            axes.set_xlabel(against_time if by_time else "iteration")
            axes.set_ylabel(unit)
            axes.legend(frameon=False, fontsize=8)

        return paint

    def bars(quantity: Quantity, unit: str) -> Paint:
        def paint(axes: Any) -> None:
            for number, (arm, members) in enumerate(arms.items()):
                values = [quantity.value(config, run) for run in members]
                axes.bar(number, np.mean(values), 0.6, color=colours[arm], alpha=0.85)
                axes.plot([number] * len(values), values, "o", color="#374151", markersize=4)
            axes.set_xticks(range(len(arms)), list(arms))
            axes.set_ylabel(unit)

        return paint

    def latencies(axes: Any) -> None:
        for number, (arm, members) in enumerate(arms.items()):
            values = [row["generate/seconds"] for run in members for row in steady(config, run)]
            box = axes.boxplot(
                values,
                positions=[number],
                widths=0.5,
                whis=(5, 95),
                patch_artist=True,
                medianprops={"color": "#111827"},
            )
            box["boxes"][0].set(facecolor=colours[arm], alpha=0.7)
        axes.set_xticks(range(len(arms)), list(arms))
        axes.set_ylabel("seconds")

    def lengths(axes: Any) -> None:
        for arm, members in arms.items():
            values = np.sort(scored_lengths(config, members))
            axes.plot(values, 1 - np.arange(len(values)) / len(values), color=colours[arm], label=arm, linewidth=1.4)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("tokens")
        axes.set_ylabel("share of responses at least so long")
        axes.legend(frameon=False, fontsize=8)

    def fates(axes: Any) -> None:
        for number, members in enumerate(arms.values()):
            base = 0.0
            rows = [row for run in members for row in steady(config, run)]
            kinds = (("trained", BLUE), ("masked", "#1e3a8a"), ("filtered", "#8b95a1"), ("discarded", RED))
            for kind, colour in kinds:
                share = _total(rows, f"ledger/tokens_{kind}") / max(_total(rows, "ledger/tokens_entered"), 1.0)
                axes.bar(number, share, 0.6, bottom=base, color=colour, label=kind if number == 0 else None)
                base += share
        axes.set_xticks(range(len(arms)), list(arms))
        axes.set_ylabel("of the tokens sampled")
        axes.legend(frameon=False, fontsize=8)

    return {
        "throughput": (
            "Rollout throughput",
            bars(QUANTITIES[0], "trained tokens per second of generate"),
            "a point a seed",
        ),
        "latency": ("Sampling latency of an iteration", latencies, "box: quartiles; whiskers: 5th and 95th percentile"),
        "reward": ("Reward by iteration", bands("carry/reward", "reward"), "mean and range over seeds"),
        "reward_time": ("Reward by time", bands("carry/reward", "reward", True), "mean and range over seeds"),
        "heldout": (
            "Held-out accuracy by iteration",
            bands("evaluate/accuracy", "accuracy"),
            "mean and range over seeds",
        ),
        "heldout_time": (
            "Held-out accuracy by time",
            bands("evaluate/accuracy", "accuracy", True),
            "mean and range over seeds",
        ),
        "lengths": ("Response lengths", lengths, "responses of ready groups in steady iterations, before the filter"),
        "tokens": ("What became of sampled tokens", fates, "steady iterations; what was carried shows when it ends"),
        "lag": (
            "Age of trained tokens",
            bands("carry/mean_version_lag", "weight versions"),
            "mean and range over seeds",
        ),
    }


def _on_common_grid(runs: Sequence[ArmRun], name: str, by_time: bool) -> tuple[np.ndarray, np.ndarray]:
    """A metric of several runs [S, N] at common iterations, or (interpolated) at common times."""
    tracks = []
    for run in runs:
        elapsed = np.concatenate([[0.0], np.cumsum(run.seconds())])
        evaluated = name.startswith("evaluate/")  # before its iteration; all else is known after it
        points = [
            (elapsed[int(row["iteration"]) + (not evaluated)] if by_time else row["iteration"], row[name])
            for row in run.history
            if math.isfinite(row.get(name, math.nan))
        ]
        if points:
            tracks.append(np.array(points).T)
    if not tracks:
        return np.empty(0), np.empty((0, 0))
    low, high = max(x[0] for x, _ in tracks), min(x[-1] for x, _ in tracks)
    grid = np.linspace(low, high, 200) if by_time else np.array(sorted({value for x, _ in tracks for value in x}))
    return grid, np.array([np.interp(grid, x, y) for x, y in tracks])


def comparison_lines(config: RunConfig, runs: Sequence[ArmRun]) -> list[str]:
    """The table and the statements as plain text."""
    arms = _by_arm(runs)
    width = max(len(quantity.name) for quantity in QUANTITIES)
    lines = [" " * width + "".join(f"{arm:>16}" for arm in arms)]
    for quantity in QUANTITIES:
        means = [np.mean([quantity.value(config, run) for run in members]) for members in arms.values()]
        lines.append(
            f"{quantity.name:<{width}}" + "".join(f"{format(float(mean), quantity.form):>16}" for mean in means)
        )
    return [*lines, *statements(config, runs)]

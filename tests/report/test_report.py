"""The report of a run, as a browser shows it, and the registry of metrics behind it."""

import math
import random

import numpy as np
import pytest

from browser import assert_sound, needs_browser, open_page
from conftest import recipe
from tasks.config import RunConfig
from tasks.report.metrics import METRICS
from tasks.report.page import body, page, running_mean, table
from tasks.report.report import SECTIONS, health, report_body, summary, write_report

OUTGOING = ("trained", "masked", "filtered", "failed", "discarded", "carried_out")


def history(iterations):
    """Metrics as a run has them: balanced books, every metric there is, an evaluation now and then."""
    chance = random.Random(1)
    rows = []
    for iteration in range(iterations):
        row = {name: chance.random() for name in METRICS if not name.startswith(("evaluate/", "ledger/"))}
        for kind in ("groups", "tokens"):
            accounts = {name: float(chance.randrange(1, 100)) for name in OUTGOING}
            accounts["carried_in"] = 1.0
            accounts["entered"] = sum(accounts[name] for name in OUTGOING) - 1.0
            row |= {f"ledger/{kind}_{name}": value for name, value in accounts.items()}
        row |= {"iteration": float(iteration), "generate/failed_scores": 0.0, "carry/quarantined_rows": 0.0}
        row |= {"ledger/groups_trained": 2.0} | {
            f"train/{name}": 0.0 for name in ("skipped_updates", "nonfinite_tokens")
        }
        row["ledger/groups_entered"] = sum(row[f"ledger/groups_{name}"] for name in OUTGOING) - 1.0
        row["carry/truncated_share"], row["train/logprob_difference_fresh"], row["train/entropy"] = 0.01, 1e-7, 0.3
        if iteration % 10 == 0:
            row |= {name: chance.random() for name in METRICS if name.startswith("evaluate/")}
        rows.append(row)
    return rows


@pytest.fixture
def config(tmp_path):
    return RunConfig.model_validate(recipe(output=str(tmp_path), name="run"))


@needs_browser
@pytest.mark.parametrize("iterations", [1, 24, 400])
def test_report_shows_every_figure_without_network_or_complaint(config, tmp_path, iterations):
    write_report(config, history(iterations))
    seen = open_page(tmp_path / "run" / "report.html")
    assert_sound(seen, figures=sum(map(len, SECTIONS.values())))
    assert f"{iterations} / 2" in seen.text
    assert (tmp_path / "run" / "report.html").stat().st_size < 2_000_000


@needs_browser
def test_report_is_readable_light_and_dark(config, tmp_path):
    write_report(config, history(3))
    light, dark = (open_page(tmp_path / "run" / "report.html", scheme).text_colour for scheme in ("light", "dark"))
    assert (light, dark) == ("rgb(0, 0, 0)", "rgb(255, 255, 255)")


@needs_browser
def test_text_of_a_recipe_is_never_markup(tmp_path):
    evil = "</pre><script>window.hacked = true</script>"
    config = RunConfig.model_validate(recipe(output=str(tmp_path), name="run", model={"path": evil}))
    write_report(config, history(2))
    seen = open_page(tmp_path / "run" / "report.html")
    assert_sound(seen, figures=10)
    assert evil in seen.text


def test_every_metric_of_the_history_is_in_the_table_with_its_meaning(config):
    content = report_body(config, history(2))
    for name, metric in METRICS.items():
        assert name == "iteration" or f"<td>{name}</td><td>{metric.unit}</td>" in content


def test_every_curve_is_of_a_documented_metric():
    drawn = {name for charts in SECTIONS.values() for chart in charts for name, _ in chart.lines}
    assert drawn <= METRICS.keys()


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"ledger/tokens_trained": 1e9}, "balance in 2 of 3"),
        ({"ledger/groups_trained": 1.0}, "2 of 3 batches were full"),
        ({"generate/failed_scores": 1000.0}, "1000 scores failed"),
        ({"carry/quarantined_rows": 2.0}, "2 rows were put aside"),
        ({"train/skipped_updates": 1.0}, "1 updates were skipped"),
        ({"carry/truncated_share": 0.9}, "90% of the newest responses ended by their budget"),
        ({"train/logprob_difference_fresh": 0.3}, "differ by at most 0.3 nats"),
        ({"train/entropy": 0.001}, "entropy went from 0.3 to 0.001"),
    ],
)
def test_health_names_what_is_wrong_and_nothing_else(config, changes, finding):
    rows = history(3)
    assert all(fine for fine, _ in health(config, rows))
    rows[-1] |= changes
    wrong = [text for fine, text in health(config, rows) if not fine]
    assert any(finding in text for text in wrong)
    assert len(wrong) <= 2  # a changed number of groups also unbalances the books


def test_summary_weights_the_resumed_share_by_tokens():
    rows = history(2)
    for row, tokens, share in zip(rows, (300.0, 100.0), (1.0, 0.0), strict=True):
        row |= {"ledger/tokens_trained": tokens, "ledger/tokens_masked": 0.0, "carry/resumed_share": share}
    assert "75% of the trained tokens" in summary(rows)


def test_running_mean_is_centred_and_leaves_out_what_is_no_number():
    assert np.allclose(running_mean([1, 2, 3, 4, 5], 1), [1.5, 2, 3, 4, 4.5])
    assert np.allclose(running_mean([1, math.nan, 3], 1), [1, 2, 3])


def test_table_cells_are_escaped():
    assert "<b>" not in table(("a", "b"), [("<b>x</b>", "1")])
    assert page("<title>", body()).count("<title>") == 1


def test_a_setting_that_is_new_is_in_the_report(config):
    shown = report_body(config, history(1))
    assert all(f"&quot;{field}&quot;" in shown for field in type(config).model_fields)

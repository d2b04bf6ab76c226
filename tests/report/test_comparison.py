"""What a comparison says of runs whose difference is known beforehand."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from browser import assert_sound, needs_browser, open_page
from conftest import recipe
from tasks.carry_over.stage import RESPONSE_SCHEMA
from tasks.compare import arms_of, comparison_directory
from tasks.config import ConfigError, RunConfig
from tasks.report.comparison import ArmRun, comparison_lines, read_arm, statements, summaries, write_comparison
from tasks.storage import write_json, write_table


def make_config(**sections):
    return RunConfig.model_validate(recipe(**({"iterations": 8, "compare": {"warm_up": 2}} | sections)))


def arm_run(arm, seed, *, reward=0.0, seconds=2.0, trained=100.0, length=50.0):
    """8 iterations; reward, time and lengths vary by seed around what is given."""
    noise = np.random.default_rng(seed)
    history, responses = [], []
    for iteration in range(8):
        row = {
            "iteration": float(iteration),
            "generate/seconds": seconds + (10.0 if iteration == 0 else 0.0),
            "generate/engine_seconds": 10.0 if iteration == 0 else 0.0,
            "generate/sampling_seconds": seconds,
            "generate/tokens": 200.0,
            "generate/reprefilled_tokens": 20.0,
            "carry/seconds": 0.5,
            "train/seconds": 1.0,
            "carry/reward": reward + 0.01 * noise.normal(),
            "carry/trained_response_tokens": length,
            "carry/off_policy_share": 0.25,
            "carry/mean_version_lag": 0.5,
            "carry/max_version_lag": 2.0,
            "ledger/groups_trained": 2.0,
            "ledger/tokens_entered": 200.0,
            "ledger/tokens_trained": trained,
            "ledger/tokens_masked": 0.0,
            "ledger/tokens_filtered": 50.0,
            "ledger/tokens_discarded": 50.0,
        }
        if iteration % 4 == 0:
            row["evaluate/accuracy"] = 0.5 + 0.05 * iteration / 4 + 0.001 * seed
        history.append(row)
        responses += [
            {"iteration": iteration, "outcome": outcome, "tokens": int(length * noise.lognormal())}
            for outcome in ("trained", "filtered", "discarded")
            for _ in range(100)
        ]
    return ArmRun(arm, seed, history, pa.Table.from_pylist(responses, RESPONSE_SCHEMA))


def runs_with(**partial):
    return [
        arm_run(arm, seed, **(partial if arm == "partial" else {}))
        for arm in ("partial", "synchronous", "discard")
        for seed in (1, 2, 3)
    ]


def test_quantities_are_those_of_the_steady_iterations():
    found = summaries(make_config(), [arm_run("partial", 1, seconds=4.0)])[0]
    assert found["trained-response tokens per second of generate"] == pytest.approx(25.0)
    assert found["sampled tokens per second of sampling"] == pytest.approx(50.0)
    assert found["sampling latency of an iteration, median, s"] == pytest.approx(4.0)
    assert found["time of an iteration, mean, s"] == pytest.approx(5.5)
    assert found["discarded tokens, share of sampled"] == pytest.approx(0.25)
    assert found["tokens prefilled once more, per sampled token"] == pytest.approx(0.1)


def test_the_start_of_an_engine_is_no_time_of_an_iteration():
    assert np.allclose(arm_run("partial", 1).seconds(), 3.5)


@pytest.mark.parametrize(("reward", "verdict"), [(0.0, "do not differ detectably"), (0.5, "they differ: +0.5")])
def test_statement_finds_a_difference_of_rewards_and_none_where_there_is_none(reward, verdict):
    lines = statements(make_config(), runs_with(reward=reward))
    reward_lines = [line for line in lines if line.startswith("mean reward")]
    assert len(reward_lines) == 2
    assert all(verdict in line and "p = " in line and "Welch" in line for line in reward_lines)


def test_one_seed_is_no_test():
    lines = statements(make_config(), [arm_run("partial", 1), arm_run("synchronous", 1)])
    assert all("there is no test" in line for line in lines if "lengths" not in line)


def test_an_arm_that_trained_on_nothing_is_still_compared(tmp_path):
    config, runs = make_config(), runs_with()
    for row in runs[0].history:
        row |= {"ledger/tokens_trained": 0.0, "generate/tokens": 0.0, "carry/reward": math.nan}
    write_comparison(config, str(tmp_path), runs)
    assert math.isnan(summaries(config, runs)[0]["mean reward"])
    assert any("there is no test" in line for line in comparison_lines(config, runs))


def test_lengths_are_compared_with_the_arm_that_waits_for_all():
    lines = [line for line in statements(make_config(), runs_with(length=20.0)) if "lengths" in line]
    distances = [float(line.split("distance ")[1].split()[0]) for line in lines]
    assert ["partial against synchronous" in line for line in lines] == [True, False]
    assert distances[0] > 0.3 > 0.05 > distances[1]


@needs_browser
def test_comparison_is_written_as_page_figures_and_tables(tmp_path):
    config, runs = make_config(), runs_with()
    write_comparison(config, str(tmp_path), runs)
    assert_sound(open_page(tmp_path / "comparison.html"), figures=9)
    assert len(list((tmp_path / "figures").glob("*.svg"))) == len(list((tmp_path / "figures").glob("*.png"))) == 9
    assert pq.read_table(tmp_path / "iterations.parquet").num_rows == 9 * 8
    assert set(pq.read_table(tmp_path / "responses.parquet")["arm"].to_pylist()) == {
        "partial",
        "synchronous",
        "discard",
    }
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary["runs"]) == 9
    assert summary["statements"] == statements(config, runs)
    assert any("mean reward" in line for line in comparison_lines(config, runs))


def test_an_arm_is_read_from_its_run_directory(tmp_path):
    written = arm_run("partial", 1)
    for iteration, row in enumerate(written.history):
        write_json(f"{tmp_path}/metrics/{iteration:04d}.json", row)
        part = written.responses.slice(iteration * 300, 300)
        write_table(f"{tmp_path}/responses/{iteration:04d}.parquet", part)
    read = read_arm("partial", 1, str(tmp_path))
    assert read.history == written.history
    assert read.responses.equals(written.responses)


def test_arms_differ_in_what_the_recipe_says_alone_and_take_turns():
    config = make_config(seed=9)
    arms = arms_of(config, "somewhere")
    assert [(arm.name, arm.seed) for arm in arms[:4]] == [
        ("partial", 1),
        ("synchronous", 1),
        ("discard", 1),
        ("synchronous", 2),
    ]
    assert len({arm.config.run_directory for arm in arms}) == 9
    first, second = arms[0].config, arms[1].config
    assert first.partial_rollout == config.partial_rollout
    assert second.partial_rollout == config.partial_rollout.model_copy(update={"enabled": False})
    for name in ("model", "data", "sampling", "train", "engine", "iterations"):
        assert getattr(first, name) == getattr(second, name) == getattr(config, name)


@pytest.mark.parametrize(
    ("compare", "message"),
    [
        ({"arms": {"one": {}}}, "compare.arms has 1 arm"),
        (
            {"arms": {"one": {}, "two": {"partial_rollout": {"enable": False}}}},
            "compare.arms.two: .*enable: unknown key",
        ),
        ({"arms": {"one": {}, "Two!": {}}}, "compare.arms.Two!: .*name"),
        ({"warm_up": 8}, "compare.warm_up = 8 leaves none of the 8 iterations"),
    ],
)
def test_a_wrong_arm_is_named_before_anything_runs(compare, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        arms_of(make_config(compare=compare), "somewhere")


def test_a_comparison_never_writes_into_another(tmp_path):
    config = make_config(output=str(tmp_path), name="run")
    assert comparison_directory(config) == f"{tmp_path}/run-compare"
    (tmp_path / "run-compare").mkdir()
    assert comparison_directory(config) == f"{tmp_path}/run-compare-2"


def test_an_arm_without_evaluations_has_no_final_accuracy():
    run = arm_run("partial", 1)
    for row in run.history:
        row.pop("evaluate/accuracy", None)
    assert math.isnan(summaries(make_config(), [run])[0]["held-out accuracy at the end"])

"""The comparison as a user runs it, with real engines and ranks, small."""

import json

import pyarrow.parquet as pq
import pytest

from browser import assert_sound, needs_browser, open_page
from tasks.carry_over.shards import read_shards
from test_dapo import run, write_recipe


@pytest.fixture(scope="module")
def compared(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("compared")
    recipe = write_recipe(
        folder,
        tiny_model,
        iterations=3,
        evaluate={"every": 3},
        partial_rollout={"max_engine_steps": None},
        compare={"seeds": [5], "warm_up": 1},
    )
    code, output = run(recipe, "compare")
    assert code == 0, output
    return folder / "runs" / "run-compare", output


def test_arms_differ_in_what_becomes_of_unfinished_responses_alone(compared):
    directory, _ = compared
    table = pq.read_table(directory / "iterations.parquet").to_pylist()
    for arm in ("partial", "synchronous", "discard"):
        rows = [row for row in table if row["arm"] == arm and row["carry/reward"] is not None]
        assert [row["iteration"] for row in rows] == [0, 1, 2]
        assert (sum(row["ledger/tokens_discarded"] for row in rows) > 0) == (arm == "discard")
        assert (sum(row["generate/cut_trajectories"] for row in rows) > 0) == (arm != "synchronous")
        assert (sum(row["carry/off_policy_share"] for row in rows) > 0) == (arm == "partial")
        assert (len(list(read_shards(str(directory / f"{arm}-5" / "carry" / "0003")))) > 0) == (arm == "partial")


def test_the_engine_is_started_once_for_all_arms(compared):
    assert compared[1].count("starting the engine") == 1


@needs_browser
def test_the_page_shows_what_was_measured(compared):
    directory, output = compared
    seen = open_page(directory / "comparison.html")
    assert_sound(seen, figures=9)
    for line in json.loads((directory / "summary.json").read_text())["statements"]:
        assert line in seen.text
        assert line in output

"""The real workflow, really killed in the middle of its stages."""

import random
import signal
import time

import pytest

from benchmarks.chaos import run_alone, run_killed, start, write_recipe
from tasks.carry_over.shards import read_shards


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("chaos")


def test_a_run_killed_at_random_moments_trains_the_prompts_of_an_undisturbed_one(folder):
    """`benchmarks/chaos.py` does the same with 50 kills."""
    expected = run_alone(folder, iterations=2)
    assert sum(map(len, expected.groups)) == 12
    found, kills = run_killed(folder, iterations=2, kills=2, chance=random.Random(1))
    assert len(kills) == 2
    assert found == expected


def test_a_run_asked_to_end_saves_what_it_has_sampled(folder):
    process = start(write_recipe(folder, "asked", iterations=2, resume=False))
    flush = folder / "runs" / "asked" / "flush" / "0000" / "manifest.json"
    while not flush.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) != 0
    saved = read_shards(str(flush.parent)).manifest
    assert f"asked to end; {saved.tokens:,} tokens are saved" in " ".join((folder / "asked.log").read_text().split())

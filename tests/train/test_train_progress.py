"""A train stage that dies between updates: the next attempt repeats none of them and ends with the same weights."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_rows import Bench, assert_same_weights, random_rows

from conftest import recipe
from tasks.config import RunConfig
from tasks.policy import read_policy
from tasks.train import stage

ROWS = random_rows(24)
PROGRAM = """
import sys
from pathlib import Path
from training_rows import Bench
from test_train_progress import ROWS, make_config
bench = Bench(Path(sys.argv[1]), Path(sys.argv[2]))
bench.train(make_config(), ROWS, name="killed")
"""


class DiedError(RuntimeError):
    pass


def make_config(**train):
    settings = {"mini_batch_responses": 4, "learning_rate": 1e-3, "save_seconds": 0.0, "warmup_updates": 4}
    return RunConfig.model_validate(recipe(train=settings | train))


@pytest.fixture
def bench(tmp_path, tiny_model):
    return Bench(tmp_path, tiny_model)


@pytest.fixture
def updates(monkeypatch):
    """Counts updates; the stage dies when `updates.left` are made."""

    class Count:
        made = 0
        left = None

    original = stage._update

    def counted(*arguments):
        if Count.left is not None and Count.made >= Count.left:
            raise DiedError
        Count.made += 1
        return original(*arguments)

    monkeypatch.setattr(stage, "_update", counted)
    return Count


def die_after(bench, updates, count, rows=ROWS, name="killed", **settings):
    updates.left = updates.made + count
    with pytest.raises(DiedError):
        bench.train(make_config(**settings), rows, name=name)
    updates.left, updates.made = None, 0


def test_no_update_is_repeated_and_the_weights_are_the_same_bit_for_bit(bench, updates):
    undisturbed = bench.train(make_config(), ROWS, name="whole")
    die_after(bench, updates, 2)
    die_after(bench, updates, 1)
    killed = bench.train(make_config(), ROWS, name="killed")
    assert updates.made == 3  # of 6
    assert_same_weights(bench.weights("killed"), bench.weights("whole"))
    assert {name: value for name, value in killed.items() if name != "seconds"} == {
        name: value for name, value in undisturbed.items() if name != "seconds"
    }


def test_a_stage_that_runs_twice_publishes_the_same_policy(bench):
    bench.train(make_config(), ROWS)
    first = read_policy(bench.path("next", "policy"))
    bench.train(make_config(save_seconds=1000.0), ROWS)
    assert read_policy(bench.path("next", "policy")) == first


def test_without_time_for_a_save_the_stage_starts_over(bench, updates):
    bench.train(make_config(), ROWS, name="whole")
    die_after(bench, updates, 3, save_seconds=1000.0)
    bench.train(make_config(), ROWS, name="killed")
    assert updates.made == 6
    assert_same_weights(bench.weights("killed"), bench.weights("whole"))


@pytest.mark.parametrize("damaged", [False, True], ids=["another batch", "damaged"])
def test_what_was_saved_for_another_batch_or_is_damaged_is_not_used(bench, updates, damaged, capsys):
    bench.train(make_config(), ROWS, name="whole")
    die_after(bench, updates, 3, rows=ROWS if damaged else random_rows(24, seed=5))
    if damaged:
        (file,) = Path(bench.path("killed", "progress")).glob("0003/*.safetensors")
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    bench.train(make_config(), ROWS, name="killed")
    assert updates.made == 6
    assert_same_weights(bench.weights("killed"), bench.weights("whole"))
    assert ("is not used" in capsys.readouterr().out) == damaged


def test_two_ranks_go_on_from_what_one_has_saved(bench, updates):
    bench.train(make_config(), ROWS, name="whole")
    die_after(bench, updates, 4)
    metrics = bench.train(make_config(ranks=2), ROWS, name="killed")
    assert metrics["updates"] == 6
    assert_same_weights(bench.weights("killed"), bench.weights("whole"), atol=1e-5)


def test_progress_in_an_object_store(bench, updates, s3, monkeypatch):
    bench.train(make_config(), ROWS, name="whole")
    local = Bench.path
    monkeypatch.setattr(
        Bench, "path", lambda self, name, kind: f"{s3}/training" if kind == "progress" else local(self, name, kind)
    )
    die_after(bench, updates, 4)
    bench.train(make_config(), ROWS, name="killed")
    assert updates.made == 2
    assert_same_weights(bench.weights("killed"), bench.weights("whole"))


def test_a_killed_process_has_lost_at_most_one_update(bench, updates, tmp_path, tiny_model):
    bench.train(make_config(), ROWS, name="whole")
    updates.made = 0
    folder = tmp_path / "process"
    folder.mkdir()
    saved = folder / "killed-progress" / "progress.json"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, folder, tiny_model],
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.DEVNULL,
    )
    while not (saved.exists() and json.loads(saved.read_text())["done"] >= 2):
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = json.loads(saved.read_text())["done"]
    Bench(folder, tiny_model).train(make_config(), ROWS, name="killed")
    assert updates.made == 6 - done
    assert_same_weights(Bench(folder, tiny_model).weights("killed"), bench.weights("whole"))

"""A stage that hangs ends with a named cause, whatever it hangs in."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from training_rows import Bench, random_rows

from scripted_engine import ScriptedEngine
from tasks.carry_over.shards import read_shards
from tasks.train.launch import RankError
from tasks.watchdog import StallError, watchdog
from test_loop import Loop

ROOT = Path(__file__).parents[1]
PROGRAM = """
import ctypes, re, sys, time
from tasks import watchdog
watchdog.GRACE_SECONDS = 0.5
hangs = {
    "python": lambda: time.sleep(1000),
    "native": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),
    "native with the lock": lambda: ctypes.PyDLL(None).pause(),
}
with watchdog.watchdog("generate", 0.5) as beat:
    hangs[sys.argv[1]]()
"""


@pytest.mark.parametrize("hang", ["python", "native", "native with the lock"])
def test_a_process_that_hangs_is_ended_and_its_stacks_are_shown(hang):
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, hang], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 1
    assert 'File "<string>", line' in process.stderr  # where it hung
    if hang == "python":
        assert "StallError: generate made no progress for stall_seconds" in process.stderr


def test_a_stage_that_gets_on_is_left_alone():
    before = signal.getsignal(signal.SIGUSR1)
    with watchdog("generate", 0.4) as beat:
        for _ in range(10):
            time.sleep(0.1)
            beat()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_an_engine_that_delivers_nothing_more_ends_the_stage_and_its_tokens_are_kept(tmp_path, monkeypatch):
    original = ScriptedEngine.step
    monkeypatch.setattr(ScriptedEngine, "step", lambda self: original(self) if loop.steps() < 10 else [])
    loop = Loop(tmp_path, length_of=lambda name: 300)
    loop.config = loop.config.model_copy(update={"stall_seconds": 0.5})
    taken = []
    loop.steps = lambda: taken.append(None) or len(taken) - 1
    with pytest.raises(StallError, match="generate made no progress for stall_seconds"):
        loop.generate()
    assert read_shards(loop.path("flush", 0)).manifest.tokens == 10 * 16


def test_a_rank_that_hangs_is_waited_for_no_longer_than_stall_seconds(tmp_path, tiny_model, make_config):
    """One of two ranks is stopped in the middle; the other names what it waited for."""
    bench = Bench(tmp_path, tiny_model)
    config = make_config(
        stall_seconds=8.0,
        train={"ranks": 2, "mini_batch_responses": 4, "micro_batch_tokens": 64, "save_seconds": 0.0},
    )
    saved = Path(bench.path("next", "progress"), "progress.json")
    stopped = []

    def stop_a_rank():
        while not saved.exists():
            time.sleep(0.01)
        ranks = subprocess.run(
            ["pgrep", "-P", str(os.getpid()), "-f", "run_rank"], capture_output=True, text=True, check=True
        )
        stopped.append(int(ranks.stdout.split()[-1]))
        os.kill(stopped[0], signal.SIGSTOP)
        time.sleep(12)
        os.kill(stopped[0], signal.SIGCONT)  # so that the agent need not wait for it

    thread = threading.Thread(target=stop_a_rank)
    thread.start()
    with pytest.raises(RankError, match=r"rank \d of 2 failed: .*(imed out|StallError)"):
        bench.train(config, random_rows(400))
    thread.join()
    assert stopped

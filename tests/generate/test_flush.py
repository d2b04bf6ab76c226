"""What a stage saves while it samples, and that an attempt after it goes on from there."""

import os
import signal
import threading
from pathlib import Path

import pytest

from scripted_engine import EngineDiedError
from tasks.carry_over.shards import read_shards, write_shards
from tasks.faults import PreemptedError
from tasks.generate.flush import Flusher
from test_loop import Loop

LONG = {"length_of": lambda name: 300, "function": "test_loop:never_the_same"}


def flushed(loop):
    return read_shards(loop.path("flush", loop.iteration))


def rollouts(loop):
    return {row.key: row for row in read_shards(loop.path("rollouts", loop.iteration))}


def test_a_stage_that_dies_goes_on_with_every_token_it_had(tmp_path):
    loop = Loop(tmp_path, **LONG)
    with pytest.raises(EngineDiedError):
        loop.generate(dies_at_step=20)
    kept = {row.key: row for row in flushed(loop)}
    assert sum(row.tokens for row in kept.values()) == 20 * 16  # every token that the engine had delivered
    loop.generate(max_engine_steps=30)
    after = rollouts(loop)
    assert kept.keys() <= after.keys()
    for key, row in kept.items():
        assert after[key].response_tokens[: row.tokens].tolist() == row.response_tokens.tolist()
    manifest = read_shards(loop.path("rollouts", 0)).manifest
    assert manifest.extra["generated_tokens"] == sum(row.tokens for row in after.values())
    assert manifest.extra["drawn_groups"] == len({row.group_id for row in after.values()})
    assert manifest.extra["counted"]["engine_steps"] == 30  # 20 of them before
    loop.carry_over()


def test_a_flush_in_an_object_store_is_continued_from_there(s3):
    loop = Loop(s3, **LONG)
    with pytest.raises(EngineDiedError):
        loop.generate(dies_at_step=20)
    loop.generate(max_engine_steps=30)
    assert flushed(loop).manifest.tokens == 20 * 16
    assert sum(row.tokens for row in rollouts(loop).values()) == 30 * 16


def test_prompts_are_not_drawn_twice_after_a_death(tmp_path):
    loop = Loop(tmp_path, length_of=lambda name: 3, function="test_loop:never_the_same", data={"shuffle": False})
    with pytest.raises(EngineDiedError):
        loop.generate(dies_at_step=5, ready_groups=10)
    drawn = {row.group_id for row in flushed(loop)}
    loop.generate(max_engine_steps=12, ready_groups=10)
    groups = list(dict.fromkeys(group for group, _ in rollouts(loop)))
    assert groups[: len(drawn)] == [f"p{number}.0" for number in range(len(drawn))]
    assert len(groups) == len(set(groups)) > len(drawn)


def test_a_complete_stage_that_runs_again_samples_nothing(tmp_path):
    loop = Loop(tmp_path, **LONG)
    loop.generate(max_engine_steps=30)
    before = rollouts(loop)
    loop.generate(dies_at_step=0, max_engine_steps=30)
    assert rollouts(loop) == before


@pytest.mark.parametrize("change", ["policy", "carry", "damage"])
def test_what_comes_from_elsewhere_or_is_damaged_is_not_continued(tmp_path, change, capsys):
    loop = Loop(tmp_path, **LONG)
    with pytest.raises(EngineDiedError):
        loop.generate(dies_at_step=20)
    if change == "policy":
        loop.version = 1
    elif change == "carry":
        write_shards([], loop.path("carry", 0), cursor=3)
    else:
        (file,) = Path(loop.path("flush", 0)).glob("*.arrow")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    loop.generate(max_engine_steps=5)
    assert read_shards(loop.path("rollouts", 0)).manifest.extra["generated_tokens"] == 5 * 16
    assert ("is not used" in capsys.readouterr().out) == (change == "damage")


def test_scores_that_failed_are_given_again_when_a_stage_is_repeated(tmp_path, monkeypatch):
    loop = Loop(tmp_path, function="test_loop:usually_broken")
    loop.generate(ready_groups=20)
    assert any(row.status == "failed" for row in rollouts(loop).values())
    mended = Loop(tmp_path, function="test_loop:never_the_same")
    mended.generate(ready_groups=20)
    assert all(row.status != "failed" for row in rollouts(mended).values())


def test_flushes_come_while_the_stage_goes_on(tmp_path):
    loop = Loop(tmp_path, **LONG)
    seen = []
    original = Flusher.update

    def watched(self, scheduler, seconds):
        original(self, scheduler, seconds)
        if self._writer is not None:
            self._writer.join()
            seen.append((flushed(loop).manifest.tokens, scheduler.counted.sampled_tokens))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Flusher, "update", watched)
        loop.generate(max_engine_steps=10, flush_seconds=1e-9)
    assert [saved for saved, _ in seen] == [sampled for _, sampled in seen] == [16 * step for step in range(1, 11)]


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, PreemptedError), (signal.SIGINT, KeyboardInterrupt)])
def test_a_process_asked_to_end_saves_all_it_has_first(tmp_path, number, error):
    loop = Loop(tmp_path, length_of=lambda name: 400, function="test_loop:never_the_same")
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    with pytest.raises(error):
        loop.generate(ready_groups=10**6, max_scored_batches=10**6)
    saved = flushed(loop)
    assert saved.manifest.tokens > 0
    assert saved.manifest.extra["counted"]["sampled_tokens"] == saved.manifest.tokens
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_flush_that_fails_stops_nothing_and_is_said(tmp_path, capsys):
    loop = Loop(tmp_path, **LONG)
    Path(loop.config.run_directory, "flush").touch()  # a file where the directory should be
    loop.generate(max_engine_steps=10, flush_seconds=1e-9)
    assert "could not save to" in capsys.readouterr().out
    assert len(rollouts(loop)) > 0

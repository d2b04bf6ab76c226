"""The real generate and carry-over stages over many iterations, engine scripted: nothing lost, doubled or biased."""

import contextlib
import functools
import hashlib
import random
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import recipe
from scripted_engine import EngineDiedError, ScriptedEngine
from tasks.carry_over.shards import read_shards, write_shards
from tasks.carry_over.stage import NoProgressError, ScoreErrorRateError, carry_over_rollouts
from tasks.config import PromptSource, RunConfig
from tasks.generate.stage import sample_iteration
from tasks.policy import Policy
from tasks.prompt_files import DataError
from tasks.prompts import Prompt, PromptSet


class Words:
    """A tokenizer whose text of a response is its number of tokens."""

    def decode(self, tokens, skip_special_tokens):
        return str(len(tokens))


def chance(*what) -> float:
    """A number in [0, 1) that depends on `what` alone."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:6], "big") / 2**48


def coin(data_source, solution_str, ground_truth, extra_info):
    """Right or wrong by a coin that knows nothing of the length."""
    return float(next(COIN) < 0.5)


def never_the_same(data_source, solution_str, ground_truth, extra_info):
    """Every group is informative."""
    return next(COIN)


def usually_broken(data_source, solution_str, ground_truth, extra_info):
    value = chance("score", solution_str)
    if value < 0.05:
        raise ValueError("a fault of the scorer")
    return float(value < 0.5)


def always_wrong(data_source, solution_str, ground_truth, extra_info):
    return 0.0


COIN = iter(random.Random(1).random, None)


def prompt_set(count):
    return [
        PromptSet(
            PromptSource(path="test"), tuple(Prompt(f"p{i}", "test", "", np.array([i]), {}) for i in range(count)), ""
        )
    ]


@functools.cache
def heavy_tail(name):
    """The length that the policy gives the response of this request."""
    return 1 + int(np.random.default_rng(int(chance(name) * 2**48)).lognormal(2.5, 1.2))


class Loop:
    """A run in a folder: stages read what the ones before wrote, and nothing else, so any of them may run again."""

    def __init__(self, folder, prompts=50, function="test_loop:coin", length_of=heavy_tail, **sections):
        self.prompts = prompt_set(prompts)
        self.length_of = length_of
        reward = {"function": function, "max_error_rate": 1.0}
        sections = {"output": str(folder), "sampling": {"max_response_tokens": 400}, "reward": reward} | sections
        self.config = RunConfig.model_validate(recipe(**sections))
        self.version = 0
        self.iteration = 0
        self.trained = []
        write_shards([], self.path("carry", 0))

    def path(self, stage, iteration):
        return f"{self.config.run_directory}/{stage}/{iteration:04d}"

    def generate(self, dies_at_step=None, **partial_rollout):
        """`dies_at_step`: the engine fails after so many steps, and the stage with it."""
        config = self.config.model_copy(
            update={"partial_rollout": self.config.partial_rollout.model_copy(update=partial_rollout)}
        )
        carry = read_shards(self.path("carry", self.iteration))
        engine = ScriptedEngine(self.length_of, version=self.version, dies_at_step=dies_at_step)
        policy = Policy(self.version, {})
        sample_iteration(
            config,
            self.iteration,
            policy,
            engine,
            Words(),
            self.prompts,
            carry,
            {},
            self.path("rollouts", self.iteration),
        )

    def carry_over(self):
        i = self.iteration
        return carry_over_rollouts(
            self.config, i, self.path("rollouts", i), self.path("batch", i), self.path("carry", i + 1)
        ).metrics

    def finish_iteration(self):
        batch = list(read_shards(self.path("batch", self.iteration)))
        self.trained.append(batch)
        self.version += bool(batch)
        self.iteration += 1

    def step(self, **partial_rollout):
        self.generate(**partial_rollout)
        metrics = self.carry_over()
        self.finish_iteration()
        return metrics


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    crashes=st.sets(st.integers(0, 23), max_size=6),
    deaths=st.lists(st.integers(0, 40), max_size=12),
    on_stale=st.sampled_from(["mask", "reroll"]),
    unfinished=st.sampled_from(["carry", "carry", "discard"]),
    lag=st.integers(0, 3),
    prompts=st.integers(1, 12),
    in_flight=st.integers(4, 30),
)
def test_books_balance_and_nothing_is_trained_twice_over_any_schedule(
    steps, crashes, deaths, on_stale, unfinished, lag, prompts, in_flight
):
    """Random cuts, crashes (the stage before it runs again), failing engines and scorers, filters and rerolls.

    That both ledgers balance, for each iteration and in all, is checked by the stage itself, which would raise.
    """
    with tempfile.TemporaryDirectory() as folder:
        partial_rollout = {"max_in_flight": in_flight, "max_version_lag": lag, "on_stale": on_stale}
        partial_rollout["unfinished"] = unfinished
        loop = Loop(folder, prompts, "test_loop:usually_broken", partial_rollout=partial_rollout)
        drawn = []
        for number, cut in enumerate(steps):
            if number < len(deaths) and deaths[number] < cut:
                with contextlib.suppress(EngineDiedError):  # or it ends before
                    loop.generate(dies_at_step=deaths[number], max_engine_steps=cut)
            for _ in range(1 + (2 * number in crashes)):
                loop.generate(max_engine_steps=cut)
            for _ in range(1 + (2 * number + 1 in crashes)):
                loop.carry_over()
            rollouts = list(read_shards(loop.path("rollouts", number)))
            drawn += dict.fromkeys(row.group_id for row in rollouts if row.created_iteration == number)
            loop.finish_iteration()
        trained = [row for batch in loop.trained for row in batch]
        assert len({row.key for row in trained}) == len(trained)
        for version, batch in enumerate(batch for batch in loop.trained if batch):
            for row in batch:
                unmasked = row.versions()[row.masked_tokens :]
                assert (version - unmasked <= lag).all()
        cursor = read_shards(loop.path("carry", loop.iteration)).manifest.cursor
        assert len(drawn) == len(set(drawn)) == cursor
        for epoch in range(cursor // prompts):
            whole = {name for name in drawn if name.endswith(f".{epoch}")}
            assert len(whole) == prompts


def test_after_a_crash_the_next_prompt_is_the_one_that_would_have_come(tmp_path):
    """Prompts 0..7 in file order, 4 drawn and 2 trained; the crashed iteration draws the same again, then 4 comes."""
    loop = Loop(
        tmp_path,
        prompts=8,
        length_of=lambda name: 3 + int(name.split("/")[1]),
        data={"shuffle": False},
        partial_rollout={"max_in_flight": 16},
        function="test_loop:always_wrong",
    )
    for _ in range(3):  # killed twice before its end
        loop.generate(max_engine_steps=2)
    loop.carry_over()
    loop.finish_iteration()
    assert read_shards(loop.path("carry", 1)).manifest.cursor == 4
    loop.generate(max_engine_steps=5)
    drawn = [row.group_id for row in read_shards(loop.path("rollouts", 1)) if row.created_iteration == 1]
    assert list(dict.fromkeys(drawn))[:5] == ["p4.0", "p5.0", "p6.0", "p7.0", "p0.1"]


def lengths_trained(folder, function, keep_unfinished=True):
    """Lengths of 10,000 trained responses of a fixed policy, without those of the first iterations, in which no long
    response can have ended yet."""
    loop = Loop(
        folder,
        prompts=100_000,
        function=function,
        partial_rollout={"max_in_flight": 400, "max_version_lag": 1000},
        train={"batch_groups": 50, "mini_batch_responses": 4},
    )
    lengths = []
    while len(lengths) < 10_000:
        loop.step()
        if loop.iteration > 10:
            lengths += [row.tokens for row in loop.trained[-1]]
        if not keep_unfinished:
            cursor = read_shards(loop.path("carry", loop.iteration)).manifest.cursor
            write_shards([], loop.path("carry", loop.iteration), cursor=cursor)
    return np.array(lengths)


UNBIASED = np.array([min(400, heavy_tail(f"fresh{i}/0/0")) for i in range(10_000)])


@pytest.mark.parametrize("function", ["test_loop:coin", "test_loop:never_the_same"], ids=["filtered", "unfiltered"])
def test_lengths_trained_are_those_of_an_unbiased_sample(tmp_path, function):
    """Two-sample Kolmogorov–Smirnov test at 1 %, heavy-tailed lengths, the real scheduler."""
    assert ks_distance(lengths_trained(tmp_path, function), UNBIASED) < ks_critical(10_000)


def test_throwing_unfinished_responses_away_would_be_biased(tmp_path):
    """That the test above can fail."""
    lengths = lengths_trained(tmp_path, "test_loop:coin", keep_unfinished=False)
    assert ks_distance(lengths, UNBIASED) > ks_critical(10_000)


def ks_distance(one, other):
    points = np.concatenate([one, other])
    cumulated = [np.searchsorted(np.sort(sample), points, side="right") / len(sample) for sample in (one, other)]
    return np.abs(cumulated[0] - cumulated[1]).max()


def ks_critical(size, level=0.01):
    return np.sqrt(-np.log(level / 2) / 2) * np.sqrt(2 / size)


def test_nothing_starves(tmp_path):
    """No trajectory is older than the iterations in which its own tokens can be sampled, and a little waiting."""
    loop = Loop(tmp_path, prompts=1000, partial_rollout={"max_in_flight": 64}, train={"batch_groups": 8})
    ages, steps = [], []
    for _ in range(40):
        loop.step()
        rows = list(read_shards(loop.path("carry", loop.iteration)))
        ages += [loop.iteration - 1 - row.created_iteration for row in rows]
        steps.append(max(row.versions().tolist().count(loop.version - 1) for row in rows))
    assert max(ages) <= 400 / np.median(steps) * 3


def test_prompts_that_teach_nothing_end_the_run_with_a_statement(tmp_path):
    loop = Loop(
        tmp_path,
        prompts=3,
        function="test_loop:always_wrong",
        partial_rollout={"max_rounds_without_progress": 3, "max_scored_batches": 2},
    )
    loop.step()
    assert loop.step()["carry/all_wrong_groups"] > 0
    loop.generate()
    with pytest.raises(NoProgressError, match=r"3 iterations in a row had no informative group: .* all wrong"):
        loop.carry_over()
    assert read_shards(loop.path("carry", 3)).manifest.cursor > 3  # epoch after epoch, without an endless loop


def test_scorer_faults_above_the_limit_stop_the_run_naming_examples_and_keep_the_rollouts(tmp_path):
    reward = {"function": "test_loop:usually_broken", "max_error_rate": 0.001}
    loop = Loop(tmp_path, reward=reward, train={"batch_groups": 20, "mini_batch_responses": 4})
    loop.generate()
    with pytest.raises(ScoreErrorRateError, match=r"of \d+ scores failed.*a fault of the scorer"):
        loop.carry_over()
    assert len(list(read_shards(loop.path("rollouts", loop.iteration)))) > 0


def test_strict_mode_refuses_to_continue_what_partial_rollout_left(tmp_path):
    loop = Loop(tmp_path)
    loop.step()
    with pytest.raises(DataError, match=r"holds \d+ trajectories of older weights"):
        loop.generate(enabled=False)


def test_a_row_lost_between_the_stages_is_found_by_the_ledger(tmp_path):
    from tasks.carry_over.ledger import LedgerError

    loop = Loop(tmp_path)
    loop.generate(max_engine_steps=20)
    shards = read_shards(loop.path("rollouts", 0))
    rows = [row for row in shards if row.tokens]
    manifest = shards.manifest
    write_shards(rows[1:], loop.path("rollouts", 0), cursor=manifest.cursor, extra=manifest.extra)
    with pytest.raises(LedgerError, match="the ledger of (groups|tokens) does not balance"):
        loop.carry_over()

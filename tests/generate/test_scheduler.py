"""Who runs next, when to stop, and what a cut leaves."""

import dataclasses
import hashlib
import time
from pathlib import Path

import numpy as np
import pytest

from scripted_engine import ScriptedEngine
from tasks.config import PromptSource, RewardConfig, SamplingConfig
from tasks.generate.engine import EngineError
from tasks.generate.rollout import Sampler, request_id, roll_out
from tasks.generate.scheduler import Scheduler, StopRules
from tasks.prompts import Draws, Prompt, PromptSet
from tasks.rewards.scoring import Scorer
from tasks.trajectory import FinishReason, Segment, Status, Trajectory, extend, violations

BUDGET = 1000


class Tokens:
    """A tokenizer that writes ids as words."""

    def decode(self, tokens, skip_special_tokens):
        return " ".join(map(str, tokens))


def odd_length(data_source, solution_str, ground_truth, extra_info):
    """The reward of these tests: 1 for a response of odd length."""
    return float(len(solution_str.split()) % 2)


def when_told(data_source, solution_str, ground_truth, extra_info):
    while not Path(extra_info["file"]).exists():
        time.sleep(0.01)
    return 1.0


def never_right(data_source, solution_str, ground_truth, extra_info):
    return 0.0


def prompt_set(count):
    prompts = [Prompt(f"p{i:06d}", "test", "", np.array([i], np.int32), {}) for i in range(count)]
    return [PromptSet(PromptSource(path="test"), tuple(prompts), "")]


def trajectory(group="g", member=0, tokens=0, version=0, **changes):
    row = Trajectory(group, member, group, "test", "", [1], 0)
    if tokens:
        row = extend(row, list(range(tokens)), [-0.5] * tokens, version)
    return dataclasses.replace(row, **changes)


def scheduler(carried=(), *, draws=None, rules=None, max_in_flight=None, version=0, wait_for_all=False, iteration=0):
    return Scheduler(
        carried,
        (lambda: draws.draw(iteration)) if draws else (lambda: pytest.fail("drew a group")),
        rules=rules or StopRules(ready_groups=1),
        max_in_flight=max_in_flight or (8 if draws else len(carried)),
        max_response_tokens=BUDGET,
        version=version,
        iteration=iteration,
        wait_for_all=wait_for_all,
    )


def run(engine, work, function="test_scheduler:odd_length", max_response_tokens=BUDGET):
    sampling = SamplingConfig(max_response_tokens=max_response_tokens)
    reward = RewardConfig(function=function, workers=0, overlong_cache=0)
    with Scorer(reward, max_response_tokens) as scorer:
        return roll_out(engine, work, scorer, Sampler(sampling, 1, Tokens(), {}))


def draws_of(count, group_size=2, cursor=0):
    return Draws(prompt_set(count), cursor=cursor, seed=1, shuffle=False, group_size=group_size)


def test_cut_before_first_token_leaves_no_trace():
    rows = [trajectory(member=0), trajectory(member=1)]
    work = scheduler(rows, rules=StopRules(ready_groups=1, max_engine_steps=0), version=3)
    work.admit()
    assert work.cut() == rows

    later = scheduler(rows, rules=StopRules(ready_groups=1, max_engine_steps=2), version=4)
    rows, _ = run(ScriptedEngine(lambda _: 100, version=4), later)
    assert [row.segments for row in rows] == [(Segment(0, 2, 4),)] * 2


def test_remaining_budget_is_exact_and_a_spent_one_never_reaches_the_engine():
    sampler = Sampler(SamplingConfig(max_response_tokens=20480), 1, Tokens(), {})
    cut = dataclasses.replace(trajectory(tokens=8000), prompt_tokens=np.arange(500))
    assert sampler.request(cut).max_tokens == 12480
    assert len(sampler.request(cut).tokens) == 8500

    engine = ScriptedEngine(lambda _: 5, version=1)
    work = scheduler([trajectory(tokens=BUDGET)], version=1, rules=StopRules(ready_groups=1, max_engine_steps=0))
    rows, _ = run(engine, work)
    assert engine.admitted == []
    assert (rows[0].status, rows[0].finish_reason) == (Status.FINISHED, FinishReason.LENGTH)
    assert rows[0].segments == (Segment(0, BUDGET, 0),)


def test_end_exactly_at_the_cut_or_at_the_budget_is_finished_by_reason():
    for length, reason in ((7, FinishReason.STOP), (BUDGET, FinishReason.STOP), (BUDGET + 1, FinishReason.LENGTH)):
        engine = ScriptedEngine(lambda _, length=length: length)
        work = scheduler([trajectory()], rules=StopRules(1, max_engine_steps=min(length, BUDGET)))
        rows, _ = run(engine, work)
        assert (rows[0].status, rows[0].finish_reason) == (Status.SCORED, reason)
        assert rows[0].tokens == min(length, BUDGET)


def test_a_response_that_never_ends_is_bounded_by_its_budget():
    rows, _ = run(ScriptedEngine(lambda _: 10**9), scheduler([trajectory()], wait_for_all=True, rules=StopRules(0)))
    assert rows[0].tokens == BUDGET
    assert rows[0].truncated


def test_in_flight_stays_full_until_the_cut():
    engine = ScriptedEngine(lambda name: 3 + 17 * (hash(name) % 5))
    work = scheduler(draws=draws_of(1000), rules=StopRules(ready_groups=10**6, max_engine_steps=50), max_in_flight=9)
    seen = []
    with Scorer(RewardConfig(function="test_scheduler:never_right", workers=0, overlong_cache=0), BUDGET) as scorer:
        roll_out(
            engine,
            work,
            scorer,
            Sampler(SamplingConfig(max_response_tokens=BUDGET), 1, Tokens(), {}),
            progress=lambda now, _: seen.append(engine.in_flight + len(now.admit())),
        )
    assert engine.most_in_flight == 9
    assert engine.in_flight == 0


def test_oldest_weights_run_first_and_new_prompts_last():
    carried = [
        trajectory("new", 0),
        trajectory("b", 0, tokens=3, version=2),
        trajectory("a", 0, tokens=3, version=1),
        trajectory("a", 1, tokens=9, version=2),
    ]
    work = scheduler(carried, draws=draws_of(9), version=3, max_in_flight=5)
    assert [row.group_id for row in work.admit()] == ["a", "a", "b", "new", "p000000.0"]


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        (StopRules(ready_groups=2), "2 informative groups are ready"),
        (StopRules(ready_groups=10**6, max_tokens=40), "40 tokens are sampled"),
        (StopRules(ready_groups=10**6, max_engine_steps=3), "3 engine steps are done"),
        (StopRules(ready_groups=10**6, max_seconds=0.0), "0 seconds have passed"),
    ],
)
def test_each_stop_rule_cuts(rules, reason):
    engine = ScriptedEngine(lambda name: 4 + int(name.split("/")[1]))
    _, stopped_by = run(engine, scheduler(draws=draws_of(100), rules=rules, max_in_flight=4))
    assert stopped_by == reason


def test_prompts_that_teach_nothing_end_the_stage():
    rules = StopRules(ready_groups=4, max_scored_groups=12)
    engine = ScriptedEngine(lambda _: 5)
    rows, reason = run(engine, scheduler(draws=draws_of(3), rules=rules), function="test_scheduler:never_right")
    assert reason == "12 groups are scored, but only 0 are informative"
    assert sum(row.status == Status.SCORED for row in rows) == 24


def test_ready_in_the_step_of_the_stop_is_kept():
    engine = ScriptedEngine(lambda name: 5 + int(name.split("/")[1]))
    rows, _ = run(engine, scheduler(draws=draws_of(4), max_in_flight=8, rules=StopRules(ready_groups=1)))
    assert sum(row.status == Status.SCORED for row in rows) == 8


def test_decoding_goes_on_beside_a_slow_scorer_and_a_cut_does_not_wait_for_it(tmp_path):
    """A scorer that answers only once a file exists: the stage is cut without it, the next one scores what is left."""
    reward = RewardConfig(function="test_scheduler:when_told", workers=1, overlong_cache=0)
    sampler = Sampler(SamplingConfig(max_response_tokens=BUDGET), 1, Tokens(), {"g": {"file": str(tmp_path / "go")}})
    engine = ScriptedEngine(lambda name: 3 if name.startswith("g/0") else 50)
    carried = [trajectory(member=0), trajectory(member=1)]
    work = scheduler(carried, draws=draws_of(9), rules=StopRules(1, max_engine_steps=20), max_in_flight=2)
    with Scorer(reward, BUDGET) as scorer:
        rows, _ = roll_out(engine, work, scorer, sampler)
    rows = [row for row in rows if row.group_id == "g"]
    assert [(row.status, row.tokens) for row in rows] == [(Status.FINISHED, 3), (Status.PARTIAL, 20)]

    (tmp_path / "go").touch()
    engine = ScriptedEngine(lambda _: 50, version=1)
    work = scheduler(rows, rules=StopRules(0), version=1, wait_for_all=True)
    with Scorer(reward, BUDGET) as scorer:
        rows, _ = roll_out(engine, work, scorer, sampler)
    assert [(row.status, row.tokens) for row in rows] == [(Status.SCORED, 3), (Status.SCORED, 50)]
    assert [request.request_id for request in engine.admitted] == ["g/1/0"]


def test_strict_mode_waits_for_all_it_launched_and_launches_no_more_than_the_batch_needs():
    engine = ScriptedEngine(lambda name: 5 + 91 * int(name.split("/")[1]), version=2)
    work = scheduler(draws=draws_of(100), rules=StopRules(3), max_in_flight=64, wait_for_all=True, version=2)
    rows, _ = run(engine, work)
    assert {row.status for row in rows} == {Status.SCORED}
    assert len(rows) >= 6
    assert {version for row in rows for version in row.versions()} == {2}
    assert work.informative_groups == 3


def test_engine_with_other_weights_than_the_label_is_refused():
    with pytest.raises(EngineError, match="holds version 1, the stage samples version 2"):
        run(ScriptedEngine(lambda _: 1, version=1), scheduler([trajectory()], version=2))


def test_engine_that_does_not_let_go_fails_the_stage():
    class Clinging(ScriptedEngine):
        def abort_all(self):
            raise EngineError("1 requests are still in the engine after aborting 1")

    work = scheduler([trajectory()], rules=StopRules(1, max_engine_steps=1))
    with pytest.raises(EngineError, match="still in the engine"):
        run(Clinging(lambda _: 5), work)


def test_resumes_count_only_when_tokens_came():
    carried = [trajectory(tokens=4, version=0)]
    work = scheduler(carried, version=1, rules=StopRules(1, max_engine_steps=0))
    work.admit()
    assert work.cut()[0].resumes == 0
    rows, _ = run(
        ScriptedEngine(lambda _: 9, version=1), scheduler(carried, version=1, rules=StopRules(1, max_tokens=1))
    )
    assert (rows[0].resumes, rows[0].segments) == (1, (Segment(0, 4, 0), Segment(4, 1, 1)))


def test_every_response_ends_at_its_own_length_however_often_it_is_cut_and_none_starves():
    def length_of(name):
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        return int(np.random.default_rng(seed).lognormal(3.0, 1.0)) + 1

    draws, carried, ended, ages, steps, iteration = draws_of(1000), [], [], [], [], 0
    while iteration < 40 or carried:
        work = Scheduler(
            carried,
            lambda i=iteration: draws.draw(i),
            rules=StopRules(ready_groups=20, max_scored_groups=40),
            max_in_flight=128,
            max_response_tokens=BUDGET,
            version=iteration,
            iteration=iteration,
            wait_for_all=iteration >= 40,
        )
        rows, _ = run(ScriptedEngine(length_of, version=iteration), work)
        assert not any(violations(row) for row in rows)
        ended += [row for row in rows if row.status == Status.SCORED]
        carried = [row for row in rows if row.status != Status.SCORED]
        ages += [iteration - row.created_iteration for row in rows]
        steps.append(work.counted.engine_steps)
        iteration += 1
    assert len({row.key for row in ended}) == len(ended) > 1500
    assert [row.tokens for row in ended] == [min(BUDGET, length_of(request_id(row))) for row in ended]
    assert any(row.resumes > 1 for row in ended)
    assert max(ages) <= BUDGET / min(steps) + 2

"""Real torchrun ranks: the same result on any number of them, and the message of a rank that fails."""

import json
import math
import signal
import time
from pathlib import Path

import pytest
from test_train_checkpoint import damage
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from training_rows import Bench, assert_same_weights, random_rows

from conftest import recipe
from tasks.config import RunConfig
from tasks.train.launch import RankError, _cause

# Mini-batches of 4, 4 and 1 rows: in the last one of three ranks two have none.
ROWS = random_rows(9)
SAME_ON_ANY_RANKS = ("loss", "gradient_norm", "clip_fraction", "entropy", "kl", "importance_weight", "updates")


def on_ranks(ranks):
    train = {"ranks": ranks, "micro_batch_tokens": 48, "learning_rate": 1e-4}
    return RunConfig.model_validate(recipe(train=train))


@pytest.fixture(scope="module")
def bench(tmp_path_factory, tiny_model):
    return Bench(tmp_path_factory.mktemp("ranks"), tiny_model)


@pytest.fixture(scope="module")
def first(bench):
    """Metrics of an iteration from the initial policy, by ranks."""
    return {ranks: bench.train(on_ranks(ranks), ROWS, name=f"first-{ranks}") for ranks in (1, 2)}


@pytest.fixture(scope="module")
def second(bench, first):
    """Metrics of the iteration after the one made on two ranks, by ranks."""
    assert 2 in first
    saved = {kind: bench.path("first-2", kind) for kind in ("policy", "optimizer")}
    rows = random_rows(9, seed=1)
    return {ranks: bench.train(on_ranks(ranks), rows, name=f"second-{ranks}", **saved) for ranks in (1, 3)}


def assert_same(found, expected):
    for name in SAME_ON_ANY_RANKS:
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
    assert all(map(math.isfinite, found.values()))


def test_two_ranks_train_as_one_does(bench, first):
    assert_same(first[2], first[1])
    assert first[1]["updates"] == 3
    assert_same_weights(bench.weights("first-2"), bench.weights("first-1"), atol=1e-5)


def test_what_two_ranks_saved_goes_on_alike_on_one_and_on_three(bench, second):
    assert_same(second[3], second[1])
    assert_same_weights(bench.weights("second-3"), bench.weights("second-1"), atol=1e-5)


def test_a_failing_rank_gives_its_own_error_at_once(bench, second):
    """The checksums of a policy are verified by rank 0 alone; rank 1 waits for it in a collective."""
    assert 3 in second
    policy, optimizer = (bench.path("second-3", kind) for kind in ("policy", "optimizer"))
    (weights,) = Path(policy).glob("*.safetensors")
    damage(weights)
    handler = signal.getsignal(signal.SIGTERM)
    began = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 0 of 2 failed: PolicyError: .*model-00001.*its content is not"):
        bench.train(on_ranks(2), ROWS, name="failed", policy=policy, optimizer=optimizer)
    assert time.monotonic() - began < 60
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not Path(bench.path("failed", "policy")).exists()


def test_damage_to_an_optimizer_is_known_to_every_rank(bench, second):
    """Each rank verifies a share of the files; were it to fail alone, the others would wait for it."""
    assert 1 in second
    policy, optimizer = (bench.path("second-1", kind) for kind in ("policy", "optimizer"))
    (weights,) = Path(optimizer).glob("*.safetensors")
    damage(weights)
    with pytest.raises(RankError, match=r"^rank [01] of 2 failed: OptimizerError: .*shard-00001.*its content is not"):
        bench.train(on_ranks(2), ROWS, name="failed-2", policy=policy, optimizer=optimizer)


def report(folder, rank, moment, message):
    (folder / f"error-{rank}.json").write_text(json.dumps({"rank": rank, "monotonic_ns": moment, "message": message}))


def failure(rank, exitcode):
    return ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=exitcode, error_file="none")


def test_the_first_rank_to_fail_is_named_not_those_that_lost_it(tmp_path):
    report(tmp_path, 0, 20, "RuntimeError: connection closed by peer")
    report(tmp_path, 1, 10, "ValueError: its own")
    failures = {0: failure(0, 1), 1: failure(1, 1), 2: failure(2, -signal.SIGTERM)}
    assert _cause(failures, str(tmp_path), 3) == "rank 1 of 3 failed: ValueError: its own"


def test_a_killed_rank_is_named_before_those_that_lost_it(tmp_path):
    report(tmp_path, 0, 20, "RuntimeError: connection closed by peer")
    cause = _cause({0: failure(0, 1), 1: failure(1, -signal.SIGKILL)}, str(tmp_path), 2)
    assert cause.startswith("rank 1 of 2 was killed: Signal 9 (SIGKILL)")

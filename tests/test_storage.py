"""What is kept of a run."""

from pathlib import Path

import pytest

from tasks.storage import RunState, latest_state, remove_superseded, write_json, write_state


def make_run(folder: Path, iterations: int) -> str:
    """Iteration 2 makes no update, so that two states share a policy."""
    version = 0
    for iteration in range(iterations + 1):
        version += iteration not in (0, 3)
        optimizer = f"optimizer/{iteration:04d}" if iteration else None
        state = RunState(iteration, f"policy/{version:04d}", f"carry/{iteration:04d}", optimizer)
        for name in filter(None, (state.policy, state.carry, state.optimizer)):
            (folder / name).mkdir(parents=True, exist_ok=True)
        if iteration:
            for stage in ("rollouts", "batch"):
                (folder / stage / f"{iteration - 1:04d}").mkdir(parents=True)
            write_json(f"{folder}/metrics/{iteration - 1:04d}.json", {})
        write_state(str(folder), state)
    return str(folder)


def kept(folder, stage):
    return [int(path.stem) for path in sorted((folder / stage).iterdir())]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "states", "policies"),
    [(1, 0, [6], [5]), (2, 0, [5, 6], [4, 5]), (1, 3, [0, 3, 6], [0, 2, 5]), (100, 0, list(range(7)), list(range(6)))],
)
def test_only_what_no_kept_state_needs_is_removed(tmp_path, keep_last, keep_every, states, policies):
    remove_superseded(make_run(tmp_path, 6), keep_last, keep_every)
    assert kept(tmp_path, "state") == kept(tmp_path, "carry") == states
    assert kept(tmp_path, "policy") == policies
    assert kept(tmp_path, "optimizer") == [iteration for iteration in states if iteration]
    assert kept(tmp_path, "batch") == kept(tmp_path, "rollouts") == [iteration - 1 for iteration in states if iteration]
    assert kept(tmp_path, "metrics") == list(range(6))
    assert latest_state(str(tmp_path)).iteration == 6


def test_the_best_policy_is_kept_with_what_its_state_needs(tmp_path):
    remove_superseded(make_run(tmp_path, 6), 1, 0, best=2)
    assert kept(tmp_path, "state") == kept(tmp_path, "carry") == [2, 6]
    assert kept(tmp_path, "policy") == [2, 5]


def test_what_is_being_written_for_the_next_iteration_stays(tmp_path):
    run = make_run(tmp_path, 3)
    (tmp_path / "carry" / "0004").mkdir()
    (tmp_path / "policy" / "0003.writing").mkdir()
    remove_superseded(run, 1, 0)
    assert (tmp_path / "carry" / "0004").exists()
    assert (tmp_path / "policy" / "0003.writing").exists()


def test_a_directory_without_states_is_no_run(tmp_path):
    assert latest_state(str(tmp_path)) is None

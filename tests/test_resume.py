"""Which state a run is continued from."""

import json
from pathlib import Path

import pytest

from conftest import recipe
from rows import group
from tasks.carry_over.shards import write_shards
from tasks.config import ConfigError, RunConfig
from tasks.policy import file_sha256, publish_initial_policy
from tasks.run import _latest_good_state, _resume
from tasks.storage import RunState, latest_state, states, write_state


@pytest.fixture
def run(tmp_path, tiny_model):
    """Three states, each with a carry, a policy and an optimizer of its own."""
    folder = tmp_path / "run"
    for number in (1, 2, 3):
        publish_initial_policy(str(tiny_model), str(folder / f"policy/{number:04d}"))
        write_shards(group(f"g{number}", [0.0, 1.0]), str(folder / f"carry/{number:04d}"))
        optimizer = folder / f"optimizer/{number:04d}"
        optimizer.mkdir(parents=True)
        weights = optimizer / "rank-0.safetensors"
        weights.write_bytes(bytes(range(100)))
        (optimizer / "optimizer.json").write_text(json.dumps({"files": {weights.name: file_sha256(weights)}}))
        state = RunState(number, f"policy/{number:04d}", f"carry/{number:04d}", f"optimizer/{number:04d}")
        write_state(str(folder), state)
    return folder


def flip(path: Path, position: float = 0.5):
    content = bytearray(path.read_bytes())
    content[int(position * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def test_an_undamaged_run_goes_on_from_its_newest_state(run):
    assert _latest_good_state(str(run)).iteration == 3


@pytest.mark.parametrize("kind", ["policy", "carry", "optimizer"])
@pytest.mark.parametrize("position", [0.0, 0.4, 1.0])
def test_any_flipped_byte_is_found_and_the_state_before_taken(run, kind, position, capsys):
    (file,) = [*run.glob(f"{kind}/0003/*.safetensors"), *run.glob(f"{kind}/0003/*.arrow")]
    flip(file, position)
    assert _latest_good_state(str(run)).iteration == 2
    assert str(file) in capsys.readouterr().out
    assert [state.iteration for state in states(str(run))] == [1, 2]  # never started from again
    assert (run / "state" / "damaged-0003.json").exists()


@pytest.mark.parametrize(
    "name", ["policy/0003/policy.json", "carry/0003/manifest.json", "optimizer/0003/optimizer.json"]
)
def test_a_missing_manifest_is_damage(run, name):
    (run / name).unlink()
    assert _latest_good_state(str(run)).iteration == 2


def test_without_a_good_state_there_is_nothing_to_continue(run):
    for file in run.glob("policy/*/*.safetensors"):
        flip(file)
    config = RunConfig.model_validate(recipe(output=str(run.parent), name="run", resume="latest-good", iterations=9))
    with pytest.raises(ConfigError, match="resume = 'latest-good': there is no run to continue"):
        _resume(config)
    assert latest_state(str(run)) is None

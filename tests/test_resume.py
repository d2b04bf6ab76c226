"""Which state a run is continued from."""

import json
from pathlib import Path

import pytest
from training_rows import random_rows

from conftest import recipe, write_prompts
from rows import group
from tasks.carry_over.shards import write_shards
from tasks.config import ConfigError, RunConfig
from tasks.policy import file_sha256, publish_initial_policy
from tasks.prompt_files import DataError
from tasks.prompts import warm_prompts
from tasks.report.metrics import METRICS
from tasks.resume import changed_settings, fingerprints
from tasks.run import _latest_good_state, _resume, conclude, prepare, record
from tasks.storage import RunState, existing_directory, latest_state, states, write_state
from tasks.train.task import train
from tasks.trajectory import BATCH_SCHEMA


def test_an_iteration_without_an_update_leaves_a_state_that_can_be_continued(tmp_path, tiny_model):
    """Policy and optimizer are then those of the iteration before, under the names they have."""
    config = RunConfig.model_validate(recipe(output=str(tmp_path), name="run", model={"path": str(tiny_model)}))
    folder = tmp_path / "run"
    publish_initial_policy(str(tiny_model), str(folder / "policy" / "0000"))
    policy, optimizer = existing_directory(f"{folder}/policy/0000"), None
    for iteration, rows in enumerate((random_rows(4), [])):
        batch = str(folder / "batch" / f"{iteration:04d}")
        write_shards(rows, batch, extra={"version": min(iteration, 1)}, schema=BATCH_SCHEMA)
        write_shards([], str(folder / "carry" / f"{iteration + 1:04d}"))
        trained = train(
            config=config, iteration=iteration, policy=policy, optimizer=optimizer, batch=existing_directory(batch)
        )
        policy, optimizer = trained.policy, trained.optimizer
        metrics = [dict.fromkeys(METRICS, 0.0)]
        record(config=config, iteration=iteration, version=trained.version, optimizer=optimizer, metrics=metrics)
    assert trained.metrics["train/updates"] == 0
    state = latest_state(str(folder))
    assert state.iteration == 2
    for name in (state.policy, state.carry, state.optimizer):
        assert (folder / name).is_dir(), name
    assert _latest_good_state(str(folder)) == state


def test_a_start_that_is_retried_keeps_its_name_until_something_was_sampled(tmp_path, tiny_model):
    write_prompts(tmp_path / "train.jsonl")
    config = RunConfig.model_validate(
        recipe(
            output=str(tmp_path), name="run", model={"path": str(tiny_model)}, data={"train": f"{tmp_path}/train.jsonl"}
        )
    )
    assert [prepare(config=config).config.name for _ in range(2)] == ["run", "run"]
    write_shards(group("g", [0.0, 1.0]), str(tmp_path / "run" / "flush" / "0000"))
    assert prepare(config=config).config.name == "run-2"


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


@pytest.fixture
def resumable(tmp_path, tiny_model):
    """Settings of a run that has just begun, with trajectories in its carry."""
    settings = recipe(
        output=str(tmp_path),
        name="run",
        model={"path": str(tiny_model)},
        data={"train": str(write_prompts(tmp_path / "train.jsonl", 12))},
    )
    config = RunConfig.model_validate(settings)
    prepare(config=config)
    _, sets = warm_prompts(config.data.train, str(tiny_model), config)
    known = fingerprints(config, str(tiny_model), sets)
    write_shards(group("g", [0.0, 1.0]), str(tmp_path / "run/carry/0000"), fingerprints=known)
    return settings | {"resume": "latest"}


def changed(settings, section, key, value):
    return RunConfig.model_validate(settings | {section: settings.get(section, {}) | {key: value}})


@pytest.mark.parametrize(
    ("section", "key", "value", "was"),
    [
        ("train", "ranks", 2, 1),
        ("train", "learning_rate", 1e-5, 1e-3),
        ("engine", "gpu_memory_utilization", 0.5, 0.9),
        ("partial_rollout", "max_in_flight", 8, 16),
        ("sampling", "seed_requests", False, True),
        ("reward", "function", "tasks.rewards.math:compute_score", "tasks.rewards.sums:compute_score"),
    ],
)
def test_a_setting_that_no_book_rests_on_may_change_and_is_said(resumable, section, key, value, was, capsys):
    assert prepare(config=changed(resumable, section, key, value)).iteration == 0
    assert f"changed since then: {section}.{key}: {was!r} → {value!r}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("sampling", "temperature", 0.5, "another sampling (sampling.temperature: 1.0 → 0.5)"),
        ("sampling", "max_response_tokens", 40, "another sampling (sampling.max_response_tokens: 48 → 40)"),
        ("data", "shuffle", False, "(data.shuffle: True → False)"),
        ("data", "max_prompt_tokens", 4, "another prompts (data.max_prompt_tokens: 16 → 4)"),
    ],
)
def test_a_setting_that_would_break_the_books_is_refused_by_name(resumable, section, key, value, message):
    with pytest.raises(DataError) as error:
        prepare(config=changed(resumable, section, key, value))
    assert message in str(error.value)
    assert "continue with the recipe they were sampled with" in str(error.value)


def test_other_prompts_in_the_same_file_are_refused(resumable, tmp_path):
    write_prompts(tmp_path / "train.jsonl", 7)
    with pytest.raises(DataError, match="were sampled with another prompts;"):
        prepare(config=RunConfig.model_validate(resumable))


def test_settings_that_never_matter_are_not_called_changes():
    before = recipe(iterations=2, output="here", resume=None)
    assert changed_settings(before, before | {"iterations": 9, "output": "there", "resume": "latest"}) == {}
    assert changed_settings(before, before | {"seed": 2}) == {"seed": "None → 2"}


def test_the_best_policy_is_named_and_kept_while_others_go(tmp_path, tiny_model):
    config = RunConfig.model_validate(
        recipe(output=str(tmp_path), name="run", iterations=5, keep_last=1, keep_best="evaluate/accuracy")
    )
    for iteration, accuracy in enumerate((0.3, 0.7, 0.5, float("nan"), 0.6)):
        version = iteration + 1
        for stage in ("policy", "optimizer", "carry"):
            (tmp_path / "run" / stage / f"{version:04d}").mkdir(parents=True)
        metrics = [dict.fromkeys(METRICS.keys() - {"iteration"}, 0.0) | {"evaluate/accuracy": accuracy}]
        optimizer = existing_directory(f"{tmp_path}/run/optimizer/{version:04d}")
        record(config=config, iteration=iteration, version=version, optimizer=optimizer, metrics=metrics)
    best = json.loads((tmp_path / "run" / "best.json").read_text())
    # Iteration 1 began with the policy that iteration 0 had made.
    assert best == {"metric": "evaluate/accuracy", "value": 0.7, "policy": "policy/0001", "iteration": 1}
    assert sorted(path.name for path in (tmp_path / "run" / "policy").iterdir()) == ["0001", "0005"]
    policy = existing_directory(f"{tmp_path}/run/policy/0005")
    conclude(config=config, policy=policy, recorded=[], final=[metrics[0] | {"evaluate/accuracy": 0.9}])
    assert json.loads((tmp_path / "run" / "best.json").read_text())["policy"] == "policy/0005"

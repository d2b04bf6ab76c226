"""The workflow as a user runs it: `pyflyte run` in a process of its own, killed, resumed, given bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pyarrow.parquet as pq
import pytest
import yaml

from conftest import SECRET, recipe, write_prompts
from tasks.carry_over.shards import read_shards
from tasks.report.metrics import METRICS, describe
from tasks.storage import latest_state, read_metrics

ROOT = Path(__file__).parents[2]


def write_recipe(folder: Path, model_directory: Path, **sections) -> Path:
    """A recipe whose cuts depend on engine steps alone, so that the same run twice is the same."""
    write_prompts(folder / "train.jsonl", 20)
    settings = recipe(
        name="run",
        output=str(folder / "runs"),
        iterations=4,
        keep_last=100,
        model={"path": str(model_directory)},
        data={"train": str(folder / "train.jsonl"), "heldout": str(folder / "train.jsonl")},
        reward={"function": "parity_reward:compute_score"},
        evaluate={"every": 4},
        partial_rollout={"max_engine_steps": 40},
    )
    for name, value in sections.items():
        settings[name] = settings.get(name, {}) | value if isinstance(value, dict) else value
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def start(recipe_file: Path, workflow: str = "dapo") -> subprocess.Popen:
    temporary = recipe_file.parent / "tmp"  # where a local Flyte keeps what its console would show
    temporary.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "TMPDIR": str(temporary)}
    pyflyte = Path(sys.executable).with_name("pyflyte")
    return subprocess.Popen(
        [pyflyte, "run", f"workflows/{workflow}.py", workflow, "--config", recipe_file],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(recipe_file: Path, workflow: str = "dapo") -> tuple[int, str]:
    process = start(recipe_file, workflow)
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def books(run_directory: Path) -> list[dict[str, float]]:
    """The part of the metrics that says what was drawn, sampled and trained, without times."""
    kept = ("iteration", "ledger/", "carry/reward", "carry/accuracy", "generate/tokens", "generate/drawn")
    return [
        {name: value for name, value in row.items() if name.startswith(kept) and "per_second" not in name}
        for row in read_metrics(str(run_directory))
    ]


def trained_prompts(run_directory: Path) -> list[list[tuple[str, int]]]:
    return [[row.key for row in read_shards(str(path))] for path in sorted((run_directory / "batch").iterdir())]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("undisturbed")
    code, output = run(write_recipe(folder, tiny_model))
    assert code == 0, output
    return folder / "runs" / "run", output


def test_run_leaves_policy_metrics_report_and_state(undisturbed):
    directory, output = undisturbed
    assert f"everything is in {directory}/" in output
    assert latest_state(str(directory)).iteration == 4
    assert pq.read_table(directory / "metrics.parquet").num_rows == 5  # and the evaluation after the last
    assert "5 iterations" not in (directory / "report.html").read_text()
    manifest = json.loads((directory / latest_state(str(directory)).policy / "policy.json").read_text())
    assert manifest["version"] >= 2


def test_every_metric_of_a_run_is_documented_and_every_documented_one_is_measured(undisturbed):
    measured = set(pq.read_table(undisturbed[0] / "metrics.parquet").column_names)
    assert measured >= METRICS.keys()
    assert all(map(describe, measured))


def test_every_stage_leaves_its_pictures_and_every_response_its_record(undisturbed):
    directory, _ = undisturbed
    names = {"generate.html", "carry-over.html", "train.html"}
    assert all({path.name for path in folder.iterdir()} == names for folder in (directory / "decks").iterdir())
    for iteration, metrics in enumerate(read_metrics(str(directory))[:4]):
        responses = pq.read_table(directory / "responses" / f"{iteration:04d}.parquet").to_pylist()
        for outcome in ("trained", "filtered", "failed"):
            tokens = sum(row["tokens"] for row in responses if row["outcome"] == outcome)
            booked = metrics[f"ledger/tokens_{outcome}"]
            assert tokens == booked + (metrics["ledger/tokens_masked"] if outcome == "trained" else 0)


def test_every_stage_has_a_deck_in_flyte(undisturbed):
    decks = [path.read_text() for path in (undisturbed[0].parents[1] / "tmp").rglob("deck.html")]
    for shown in ("Every slot of the engine", "What came in, on the left", "tokens trained", "Every metric"):
        assert sum(shown in deck for deck in decks) >= 4, shown


def test_the_report_shows_the_newest_iteration_while_the_run_goes_on(undisturbed, tmp_path, tiny_model):
    process = start(write_recipe(tmp_path, tiny_model))
    report = tmp_path / "runs" / "run" / "report.html"
    while not report.exists():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    assert "1 / 4" in report.read_text()
    process.kill()
    process.communicate()


def test_every_iteration_is_printed_with_balanced_books(undisturbed):
    directory, output = undisturbed
    lines = [line for line in output.splitlines() if "│ groups: " in line or "│ tokens: " in line]
    assert len(lines) == 8
    for line in lines:
        left, right = line.split(": ")[1].split(" = ")
        assert sum(_numbers(left)) == sum(_numbers(right))
    totals = books(directory)
    assert all(totals[i]["ledger/tokens_carried_out"] == totals[i + 1]["ledger/tokens_carried_in"] for i in range(3))


def _numbers(text: str) -> list[int]:
    return [int(part.split()[0].replace(",", "")) for part in text.split(" + ")]


def test_cut_trajectories_are_resumed_by_newer_weights(undisturbed):
    directory, _ = undisturbed
    rows = [row for path in sorted((directory / "rollouts").iterdir()) for row in read_shards(str(path))]
    assert any(len({segment.version for segment in row.segments}) > 1 for row in rows)


def test_engine_and_trainer_agree_on_tokens_of_the_current_weights(undisturbed):
    differences = [row.get("train/logprob_difference_fresh") for row in read_metrics(str(undisturbed[0]))]
    measured = [difference for difference in differences if difference is not None]
    assert measured
    assert max(measured) < 1e-4


def test_killed_and_resumed_run_equals_the_undisturbed_one(undisturbed, tmp_path, tiny_model):
    directory = tmp_path / "runs" / "run"
    process = start(write_recipe(tmp_path, tiny_model))
    while not (directory / "state" / "0002.json").exists():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    code, output = run(write_recipe(tmp_path, tiny_model, resume=str(directory)))
    assert code == 0, output
    assert f"resuming {directory} at iteration" in output
    assert books(directory) == books(undisturbed[0])
    assert trained_prompts(directory) == trained_prompts(undisturbed[0])


def test_damaged_weights_are_named_and_the_run_goes_on_from_the_last_good_state(undisturbed, tmp_path, tiny_model):
    directory = tmp_path / "runs" / "run"
    shutil.copytree(undisturbed[0], directory)
    (directory / "state" / "0004.json").unlink()
    for path in (*directory.glob("metrics/000[34].json"), *directory.glob("rollouts/0003/manifest.json")):
        path.unlink()
    newest = directory / latest_state(str(directory)).policy
    (weights,) = newest.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-9] ^= 1
    weights.write_bytes(content)
    code, output = run(write_recipe(tmp_path, tiny_model, resume="latest"))
    assert code != 0
    assert weights.name in output
    code, output = run(write_recipe(tmp_path, tiny_model, resume="latest-good"))
    assert code == 0, output
    assert "is damaged and set aside" in output
    assert books(directory) == books(undisturbed[0])
    assert trained_prompts(directory) == trained_prompts(undisturbed[0])


def test_a_run_in_an_object_store_equals_a_local_one_and_resumes_from_there(undisturbed, tmp_path, tiny_model, s3):
    store = fsspec.filesystem("s3")
    store.put(f"{tiny_model}/", f"{s3}/model/", recursive=True)
    write_prompts(tmp_path / "train.jsonl", 20)
    store.put(str(tmp_path / "train.jsonl"), f"{s3}/train.jsonl")
    sections = {"output": f"{s3}/runs", "data": {"train": f"{s3}/train.jsonl"}}
    code, output = run(write_recipe(tmp_path, f"{s3}/model", iterations=2, **sections))
    assert code == 0, output
    code, output = run(write_recipe(tmp_path, f"{s3}/model", resume=f"{s3}/runs/run", **sections))
    assert code == 0, output
    assert books(f"{s3}/runs/run") == books(undisturbed[0])
    written = store.cat(store.find(f"{s3}/runs"))
    assert len(written) > 30
    assert not [name for name, content in written.items() if SECRET.encode() in content]
    assert SECRET not in output


def test_a_run_killed_after_its_last_iteration_can_still_be_concluded(undisturbed, tmp_path, tiny_model):
    directory = tmp_path / "runs" / "run"
    shutil.copytree(undisturbed[0], directory)
    (directory / "report.html").unlink()
    (directory / "metrics" / "0004.json").unlink()
    code, output = run(write_recipe(tmp_path, tiny_model, resume="latest"))
    assert code == 0, output
    assert (directory / "report.html").exists()
    assert (
        read_metrics(str(directory))[4]["evaluate/accuracy"]
        == read_metrics(str(undisturbed[0]))[4]["evaluate/accuracy"]
    )
    assert books(directory) == books(undisturbed[0])


def test_a_taken_name_gets_a_number(undisturbed, tiny_model):
    directory, _ = undisturbed
    before = books(directory)
    folder = directory.parent.parent
    code, output = run(write_recipe(folder, tiny_model, iterations=1))
    assert code == 0, output
    assert books(directory) == before
    assert latest_state(str(directory.with_name("run-2"))).iteration == 1


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"train": "absent.jsonl"}}, "absent.jsonl: no such file"),
        ({"model": {"path": "absent"}}, "absent: no such directory"),
        ({"reward": {"function": "absent:f"}}, "reward.function"),
        ({"train": {"group_size": 5}}, "train.mini_batch_responses = 4 does not divide"),
        ({"surprise": 1}, "surprise: unknown key"),
        ({"resume": "absent"}, "there is no run to continue"),
        ({"sampling": {"max_response_tokens": 1000}}, "the model takes 512 tokens"),
    ],
)
def test_bad_input_ends_the_run_before_an_engine_starts(tmp_path, tiny_model, sections, message):
    code, output = run(write_recipe(tmp_path, tiny_model, **sections))
    assert code != 0
    assert message in " ".join(output.replace("│", " ").split())
    assert "starting the engine" not in output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_model": {}}, "row 0 has no reward_model.ground_truth"),
        ({"prompt": []}, "row 0 has an empty prompt"),
        (None, "the file has no rows"),
    ],
)
def test_bad_prompts_end_the_run_before_an_engine_starts(tmp_path, tiny_model, changes, message):
    path = write_recipe(tmp_path, tiny_model)
    write_prompts(tmp_path / "train.jsonl", 0 if changes is None else 2, **(changes or {}))
    code, output = run(path)
    assert code != 0
    assert message in " ".join(output.replace("│", " ").split())
    assert "starting the engine" not in output


def test_a_model_without_tokenizer_ends_the_run_before_an_engine_starts(tmp_path, tiny_model):
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("tokenizer*"))
    code, output = run(write_recipe(tmp_path, model))
    assert code != 0
    assert "has no tokenizer" in " ".join(output.replace("│", " ").split())
    assert "starting the engine" not in output


def test_strict_run_never_mixes_versions(tmp_path, tiny_model):
    path = write_recipe(
        tmp_path,
        tiny_model,
        iterations=2,
        partial_rollout={"enabled": False, "max_engine_steps": None},
    )
    code, output = run(path)
    assert code == 0, output
    directory = tmp_path / "runs" / "run"
    for number, path in enumerate(sorted((directory / "batch").iterdir())):
        assert {version for row in read_shards(str(path)) for version in row.versions()} == {number}
        assert read_shards(str(directory / "carry" / f"{number + 1:04d}")).manifest.rows == 0

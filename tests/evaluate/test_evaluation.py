"""`workflows/evaluate.py` on real checkpoints: its numbers against those worked out from the answers it keeps."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from conftest import recipe, save_tiny_model, write_prompts
from tasks.config import ConfigError, RunConfig
from tasks.policy import publish_initial_policy, seal_policy
from workflows.evaluate import evaluate

SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    digits = [character for character in solution_str if character.isdigit()]
    answer = digits[-1] if digits else None
    return {"accuracy": float(answer is not None and int(answer) % 3 == int(ground_truth) % 3), "answer": answer}
"""
SAMPLES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    (folder / "scorer.py").write_text(SCORER)
    write_prompts(folder / "small.jsonl", 3)
    write_prompts(folder / "large.jsonl", 9, data_source="other")
    save_tiny_model(folder / "model")
    publish_initial_policy(str(folder / "model"), str(folder / "policy"))
    seal_policy(str(folder / "policy"), version=7)
    return folder


def settings(folder, **evaluated):
    return RunConfig.model_validate(
        recipe(
            output=str(folder / "runs"),
            model={"path": str(folder / "model")},
            data={"heldout": [str(folder / "small.jsonl"), str(folder / "large.jsonl")]},
            reward={"function": f"{folder}/scorer.py:compute_score"},
            evaluate={"samples_per_prompt": SAMPLES, "at": [1, 2, 4]} | evaluated,
        )
    )


def kept(directory):
    """The answers of each set, as rows."""
    return {
        name: pa.ipc.open_file(f"{directory}/answers/0000/{name}.arrow").read_all().to_pylist()
        for name in ("small", "large")
    }


@pytest.fixture(scope="module")
def evaluated(folder):
    return evaluate(config=settings(folder), checkpoint=str(folder / "policy"))


def test_every_answer_of_every_set_is_kept_with_what_was_read_from_it(evaluated):
    answers = kept(evaluated.directory)
    for name, count in (("small", 3), ("large", 9)):
        assert len(answers[name]) == count * SAMPLES
        assert len({(row["prompt_id"], row["sample"]) for row in answers[name]}) == count * SAMPLES
    for row in itertools.chain(*answers.values()):
        first = row["prompt"].split()[0]
        assert row["ground_truth"] == str(2 * int(first) % 10)
        assert row["tokens"] == 48 or row["finish_reason"] == "stop"
        if row["finish_reason"] == "length":  # an answer that was cut off by its budget is none
            assert (row["accuracy"], row["answer"], row["score_status"]) == (0.0, None, "ok")
            continue
        digits = [character for character in row["response"] if character.isdigit()]
        assert row["answer"] == (digits[-1] if digits else None)
        assert row["accuracy"] == float(bool(digits) and (int(digits[-1]) - int(row["ground_truth"])) % 3 == 0)
    assert {row["data_source"] for row in answers["large"]} == {"other"}


def by_hand(rows):
    """Means over prompts by plain enumeration of subsets."""
    members = {}
    for row in rows:
        members.setdefault(row["prompt_id"], []).append((row["accuracy"] == 1.0, row["answer"]))
    found = {"accuracy": np.mean([np.mean([right for right, _ in each]) for each in members.values()])}
    for k in (1, 2, 4):
        passes, majorities = [], []
        for each in members.values():
            subsets = list(itertools.combinations(each, k))
            passes.append(np.mean([any(right for right, _ in subset) for subset in subsets]))
            majorities.append(np.mean([vote(subset) for subset in subsets]))
        found |= {f"pass@{k}": np.mean(passes), f"maj@{k}": np.mean(majorities)}
    truncated = np.mean([row["finish_reason"] == "length" for row in rows])
    return found | {"truncated_share": truncated, "response_tokens": np.mean([row["tokens"] for row in rows])}


def vote(subset):
    names = ["right" if right else answer for right, answer in subset if right or answer is not None]
    most = max((names.count(name) for name in names), default=0)
    winners = {name for name in names if names.count(name) == most}
    return ("right" in winners) / len(winners) if winners else 0.0


def test_every_number_equals_the_one_worked_out_by_hand_from_the_answers(evaluated):
    of_sets = {name: by_hand(rows) for name, rows in kept(evaluated.directory).items()}
    assert 0.0 < of_sets["large"]["accuracy"] < 1.0
    for name, expected in of_sets.items():
        for metric, value in expected.items():
            assert evaluated.metrics[f"evaluate/{name}/{metric}"] == pytest.approx(value, abs=1e-9), (name, metric)
    for metric in of_sets["small"]:
        together = np.mean([expected[metric] for expected in of_sets.values()])
        assert evaluated.metrics[f"evaluate/{metric}"] == pytest.approx(together, abs=1e-9)
    written = json.loads(Path(evaluated.directory, "evaluation.json").read_text())
    assert written["metrics"] == evaluated.metrics


def without_time(metrics):
    return {name: value for name, value in metrics.items() if name != "evaluate/seconds" and not math.isnan(value)}


def test_the_same_seed_gives_the_same_answers_also_from_a_plain_model_directory_and_another_seed_others(
    evaluated, folder
):
    again = evaluate(config=settings(folder), checkpoint=str(folder / "policy"))
    plain = evaluate(config=settings(folder), checkpoint="")  # model.path
    other = evaluate(config=settings(folder, seed=2), checkpoint="")
    assert len({found.directory for found in (evaluated, again, plain, other)}) == 4
    for found in (again, plain):
        assert kept(found.directory) == kept(evaluated.directory)
        assert without_time(found.metrics) == without_time(evaluated.metrics)
    assert kept(other.directory) != kept(evaluated.directory)


def test_sampling_of_its_own_is_used(folder):
    greedy = settings(folder, sampling={"temperature": 0.0, "max_response_tokens": 12})
    rows = [row for part in kept(evaluate(config=greedy, checkpoint="").directory).values() for row in part]
    assert max(row["tokens"] for row in rows) == 12
    assert len({(row["prompt_id"], row["response"]) for row in rows}) == 3 + 9


def test_without_prompts_there_is_nothing_to_evaluate(folder):
    with pytest.raises(ConfigError, match="data.heldout names no prompts"):
        evaluate(config=RunConfig.model_validate(recipe(output=str(folder / "runs"))), checkpoint="")

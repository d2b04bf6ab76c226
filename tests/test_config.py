"""Recipes: what is refused, and that the message says what to do."""

import pytest
import yaml

from conftest import recipe
from tasks.config import ConfigError, RunConfig


def refused(message, **sections):
    with pytest.raises(ConfigError) as error:
        RunConfig.model_validate(recipe(**sections))
    for part in message:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"iteration": 3}, ["iteration: unknown key", "iterations"]),
        ({"train": {"lr": 1.0}}, ["train.lr: unknown key", "learning_rate"]),
        ({"train": {"mini_batch_responses": 3}}, ["mini_batch_responses = 3", "divisor of 8"]),
        ({"partial_rollout": {"max_in_flight": 2}}, ["max_in_flight = 2", "group_size = 4"]),
        ({"partial_rollout": {"ready_groups": 1}}, ["ready_groups = 1", "batch_groups = 2"]),
        ({"reward": {"overlong_cache": 48}}, ["overlong_cache = 48", "max_response_tokens = 48"]),
        ({"sampling": {"temperature": 0}}, ["sampling.temperature = 0", "evaluate.sampling"]),
        ({"sampling": {"top_p": 0.9}}, ["top_p = 0.9", "evaluate.sampling"]),
        ({"sampling": {"top_k": 5}}, ["top_k = 5", "evaluate.sampling"]),
        ({"engine": {"max_context_tokens": 63}}, ["max_context_tokens = 63", "= 64"]),
        ({"reward": {"correct": -1.0}}, ["reward.correct = -1.0", "reward.wrong"]),
        ({"evaluate": {"every": 5}}, ["data.heldout"]),
        ({"evaluate": {"sampling": {"max_response_tokens": 500}}}, ["evaluate.sampling.max_response_tokens = 500"]),
        ({"evaluate": {"at": [1, 8], "samples_per_prompt": 4}}, ["evaluate.at", "pass@8", "at least 8, now 4"]),
        ({"data": {"train": ["a/x.parquet", "b/x.parquet"]}}, ["data.train: 2 sets", "called x", "give each a name"]),
        (
            {"data": {"train": [{"path": "x", "columns": {"question": "prompt"}}]}},
            ["x: columns has unknown question", "known: prompt"],
        ),
        ({"data": {"train": [{"path": "x", "weight": 0}]}}, ["data.train.0.weight", "greater than 0"]),
        ({"data": {"train": []}}, ["data.train", "at least 1"]),
        ({"data": {"heldout": [{"path": "x", "weight": 2}]}}, ["data.heldout: weight of x", "remove the weight"]),
        ({"objective": {"ratio": "sequence", "correction": "none"}}, ["ratio = 'sequence'", "enabled: false"]),
        (
            {"objective": {"ratio": "sequence"}, "partial_rollout": {"enabled": False}},
            ["ratio = 'sequence' with objective.correction", "set it to none"],
        ),
        (
            {"train": {"schedule": "linear", "final_learning_rate": 1.0}},
            ["final_learning_rate = 1.0", "learning_rate = 0.001", "linear schedule falls"],
        ),
        ({"name": "No Spaces"}, ["name"]),
        ({"objective": {"correction": "sequence"}}, ["objective.correction", "decoupled"]),
        ({"iterations": 0}, ["iterations", "greater than 0"]),
    ],
)
def test_impossible_settings_are_refused_by_name(sections, message):
    refused(message, **sections)


def test_every_fault_is_named_at_once():
    refused(
        ["mini_batch_responses", "max_in_flight"],
        train={"mini_batch_responses": 3},
        partial_rollout={"max_in_flight": 1},
    )


def test_recipe_file_errors_name_the_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    with pytest.raises(ConfigError, match="recipe.yaml: cannot read"):
        RunConfig.from_yaml(path)
    path.write_text("- a list")
    with pytest.raises(ConfigError, match="recipe.yaml: a recipe is a mapping"):
        RunConfig.from_yaml(path)
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="recipe.yaml: not YAML"):
        RunConfig.from_yaml(path)
    path.write_text(yaml.safe_dump(recipe(extra=1)))
    with pytest.raises(ConfigError, match="recipe.yaml: .*\n.*extra: unknown key"):
        RunConfig.from_yaml(path)


def test_recipe_survives_json(make_config):
    config = make_config()
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_defaults_are_those_of_the_paper():
    minimal = {key: recipe()[key] for key in ("name", "iterations", "model")}
    config = RunConfig.model_validate(minimal | {"data": {"train": "a.parquet"}, "reward": {"function": "a:b"}})
    assert (config.objective.clip_low, config.objective.clip_high) == (0.2, 0.28)
    assert (config.train.batch_groups, config.train.group_size, config.updates_per_iteration) == (512, 16, 16)
    assert config.warmup_updates == 20 * 16
    assert config.max_context_tokens == 2048 + 20480


def test_config_needs_no_heavy_library():
    import subprocess
    import sys

    code = "import sys, tasks.config; print([m for m in ('torch', 'vllm', 'ray', 'transformers') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"

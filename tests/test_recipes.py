"""The shipped recipes are valid, state their memory truly, and run through the loop at 1/8 of their width."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
import yaml

from conftest import one_iteration, save_tiny_model
from tasks import memory
from tasks.carry_over.shards import read_shards
from tasks.config import RunConfig
from tasks.memory import GIB, sampling_needs, training_needs
from tasks.policy import read_policy
from tasks.validate import main, with_settings

CONFIGS = Path(__file__).parents[1] / "configs"
QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
} | {"head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 40960}
QWEN25_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
} | {"vocab_size": 152064, "tie_word_embeddings": False, "max_position_embeddings": 131072}
QWEN25_32B = {
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
} | {"vocab_size": 152064, "tie_word_embeddings": False, "max_position_embeddings": 131072}
RECIPES = {
    "qwen2_5_7b": (transformers.Qwen2Config, QWEN25_7B),
    "qwen3_0_6b": (transformers.Qwen3Config, QWEN3_06B),
    "dapo_qwen2_5_32b": (transformers.Qwen2Config, QWEN25_32B),
    "gsm8k_qwen3_0_6b": (transformers.Qwen3Config, QWEN3_06B),
}


def test_every_recipe_is_here():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*RECIPES, "sandbox"}


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_states_the_memory_that_is_worked_out(name, tmp_path, monkeypatch):
    kind, shape = RECIPES[name]
    architecture = kind(**shape)
    architecture.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(architecture)
    count = sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(memory, "parameter_count", lambda _: count)
    path = CONFIGS / f"{name}.yaml"
    config = RunConfig.from_yaml(path)
    stated = re.search(r"generate ([\d.]+) GiB .* train ([\d.]+) GiB", path.read_text())
    needs = [sum(part(config, str(tmp_path), True).values()) / GIB for part in (sampling_needs, training_needs)]
    assert [float(part) for part in stated.groups()] == [round(need, 1) for need in needs]


def small(name: str, folder: Path) -> RunConfig:
    """The recipe with a model of 1/8 of the width, its own schema of data, few groups and short answers."""
    kind, shape = RECIPES[name]
    width = shape["hidden_size"] // 8
    heads = width // 64
    model = kind(
        **shape
        | {"hidden_size": width, "intermediate_size": shape["intermediate_size"] // 8}
        | {
            "num_attention_heads": heads,
            "num_key_value_heads": 1 if heads % 2 else 2,
            "num_hidden_layers": 2,
            "vocab_size": 64,
        }
        | {"head_dim": 64, "max_position_embeddings": 4096, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    )
    save_tiny_model(folder / "model")  # for its tokenizer
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(model).to(torch.bfloat16).save_pretrained(folder / "model")
    if "gsm8k" in name:
        rows = [{"question": f"{i}+{i}=", "answer": f"steps\n#### {2 * i}"} for i in range(8)]
    else:
        rows = [
            {
                "data_source": "math_dapo",
                "prompt": [{"role": "user", "content": f"{i % 8}+1="}],
                "reward_model": {"ground_truth": str(i % 8 + 1), "style": "rule"},
                "extra_info": {"index": str(i)},
            }
            for i in range(16)
        ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
    settings = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    for part in ("train", "heldout"):
        sets = settings["data"][part]
        changed = (
            [{**sets[0], "path": str(folder / "data.parquet")}]
            if isinstance(sets, list)
            else str(folder / "data.parquet")
        )
        settings["data"][part] = changed
    changes = [
        f"output={folder}",
        f"model.path={folder / 'model'}",
        "sampling.max_response_tokens=16",
        "evaluate.every=0",
        "evaluate.sampling=null",
        "reward.overlong_cache=4",
        "reward.workers=0",
        "partial_rollout.max_in_flight=16",
        "partial_rollout.max_engine_steps=40",
        "engine.kv_cache_gib=0.25",
        "engine.enforce_eager=true",
        "train.batch_groups=2",
        "train.group_size=4",
        "train.mini_batch_responses=4",
        "train.ranks=1",
        "data.max_prompt_tokens=256",
    ]
    return RunConfig.model_validate(with_settings(settings, changes))


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_runs_through_generate_and_train_at_an_eighth_of_its_width(name, tmp_path):
    config = small(name, tmp_path)
    config = config.model_copy(
        update={"reward": config.reward.model_copy(update={"function": "parity_reward:compute_score"})}
    )
    metrics = one_iteration(config, tmp_path)
    assert len(read_shards(str(tmp_path / "batch")))
    assert metrics["train/updates"] > 0
    assert metrics["train/logprob_difference_fresh"] < 0.02  # both compute in bfloat16
    assert read_policy(str(tmp_path / "new"), verify=True).version == 1


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_passes_validate(name, tmp_path, capsys):
    config = small(name, tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert main([str(tmp_path / "recipe.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "8 kept" in shown
    assert "the scorer accepts 8 of 8 ground truths when they are stated" in shown
    assert ("8 duplicates" in shown) == ("gsm8k" not in name)
    assert main([str(tmp_path / "recipe.yaml"), "--set", "data.train=absent.parquet"]) == 1
    assert "absent.parquet: no such file" in capsys.readouterr().err

"""What train writes can be read by others, and what it reads is refused unless it is whole and belongs together."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from training_rows import Bench, random_rows

from conftest import recipe, save_tiny_model
from tasks.config import RunConfig
from tasks.policy import PolicyError, read_policy
from tasks.train.checkpoint import OptimizerError


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_model):
    """Two iterations."""
    bench = Bench(tmp_path_factory.mktemp("trained"), tiny_model)
    config = RunConfig.model_validate(recipe())
    bench.train(config, random_rows(4), name="first")
    bench.train(config, random_rows(4), name="second", **after(bench, "first"))
    return bench


def after(bench, name):
    return {"policy": bench.path(name, "policy"), "optimizer": bench.path(name, "optimizer")}


def copied(bench, tmp_path, kind, name="second"):
    return Path(shutil.copytree(bench.path(name, kind), tmp_path / kind))


def test_a_saved_policy_is_the_next_version_and_verifies(trained):
    assert read_policy(trained.path("first", "policy"), verify=True).version == 1
    assert read_policy(trained.path("second", "policy"), verify=True).version == 2


def test_a_saved_policy_loads_in_transformers_with_its_tokenizer(trained):
    directory = trained.path("second", "policy")
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    assert torch.equal(model.model.norm.weight, trained.weights("second")["model.norm.weight"])
    assert transformers.AutoTokenizer.from_pretrained(directory)("1+1=")["input_ids"]


def test_names_shapes_and_dtypes_of_weights_stay(trained):
    before, now = trained.weights(), trained.weights("second")
    assert {name: (w.shape, w.dtype) for name, w in before.items()} == {n: (w.shape, w.dtype) for n, w in now.items()}


def test_the_index_names_the_file_of_every_tensor(trained):
    directory = Path(trained.path("second", "policy"))
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {name: path.name for path in directory.glob("*.safetensors") for name in load_file(path)}


def test_a_bfloat16_policy_stays_bfloat16_and_its_float32_weights_go_on(tmp_path, make_config):
    model = save_tiny_model(tmp_path / "model")
    weights = {name: w.bfloat16() for name, w in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    bench = Bench(tmp_path, model)
    config = make_config(train={"learning_rate": 1e-6})  # far below a bfloat16 step
    bench.train(config, random_rows(4), name="first")
    assert {w.dtype for w in bench.weights("first").values()} == {torch.bfloat16}
    (file,) = Path(bench.path("first", "optimizer")).glob("*.safetensors")
    master = load_file(file)["weight.model.norm.weight"]
    assert master.dtype == torch.float32
    assert not torch.equal(master, bench.weights()["model.norm.weight"].float())
    bench.train(config, random_rows(4), name="second", **after(bench, "first"))
    (file,) = Path(bench.path("second", "optimizer")).glob("*.safetensors")
    moved = load_file(file)["weight.model.norm.weight"] - bench.weights()["model.norm.weight"].float()
    assert moved.abs().max() > 1.5e-6  # two steps of up to 1e-6: the first was not lost in rounding


def test_experts_are_saved_under_the_names_of_the_checkpoint(tmp_path, make_config):
    model = save_tiny_model(tmp_path / "model")
    torch.manual_seed(0)
    settings = json.loads((model / "config.json").read_text())
    kept = {name: settings[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim")}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "tie_word_embeddings": False}
    config = transformers.Qwen3MoeConfig(**kept, **experts, eos_token_id=1)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(model)
    bench = Bench(tmp_path, model)
    bench.train(make_config(), random_rows(4))
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in bench.weights()
    assert bench.weights("next").keys() == bench.weights().keys()
    assert not torch.equal(bench.weights("next")["lm_head.weight"], bench.weights()["lm_head.weight"])


def test_nothing_written_needs_unpickling(trained):
    files = [path for kind in ("policy", "optimizer") for path in Path(trained.path("second", kind)).iterdir()]
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".jinja"}


def test_nothing_unfinished_is_left(trained):
    assert not list(trained.folder.glob("*.writing"))


def train_from(bench, config, **directories):
    return bench.train(config, random_rows(4), name="refused", **after(bench, "second") | directories)


def test_a_torn_policy_is_refused(trained, tmp_path, make_config):
    policy = copied(trained, tmp_path, "policy")
    (policy / "policy.json").unlink()
    with pytest.raises(PolicyError, match=r"policy/policy\.json: missing"):
        train_from(trained, make_config(), policy=str(policy))


def test_a_policy_with_a_damaged_file_is_refused(trained, tmp_path, make_config):
    policy = copied(trained, tmp_path, "policy")
    damage(policy / "model-00001.safetensors")
    with pytest.raises(PolicyError, match=r"policy/model-00001\.safetensors: its content is not"):
        train_from(trained, make_config(), policy=str(policy))


def damage(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_an_optimizer_of_another_policy_is_refused(trained, make_config):
    first, second = (read_policy(trained.path(name, "policy")).fingerprint[:12] for name in ("first", "second"))
    with pytest.raises(OptimizerError, match=f"first-optimizer: belongs to the policy {first}, .* is {second}"):
        train_from(trained, make_config(), optimizer=trained.path("first", "optimizer"))


def test_a_torn_optimizer_is_refused(trained, tmp_path, make_config):
    optimizer = copied(trained, tmp_path, "optimizer")
    (file,) = optimizer.glob("*.safetensors")
    damage(file)
    with pytest.raises(OptimizerError, match=f"{file.name}: its content is not"):
        train_from(trained, make_config(), optimizer=str(optimizer))
    file.unlink()
    with pytest.raises(OptimizerError, match=f"optimizer: holds .* names .*{file.name}"):
        train_from(trained, make_config(), optimizer=str(optimizer))
    (optimizer / "optimizer.json").unlink()
    with pytest.raises(OptimizerError, match=r"optimizer\.json: missing"):
        train_from(trained, make_config(), optimizer=str(optimizer))

"""Policies on disk: what is refused, and that a torn one is never read."""

import json
import os
import shutil

import pytest

from tasks.policy import PolicyError, publish_initial_policy, read_policy, seal_policy


@pytest.fixture
def policy(tmp_path, tiny_model):
    directory = tmp_path / "policy"
    publish_initial_policy(str(tiny_model), str(directory))
    return directory


def test_initial_policy_is_version_0_and_leaves_the_model_as_it_was(policy, tiny_model):
    read = read_policy(str(policy), verify=True)
    assert (read.version, list(read.files)) == (0, ["model.safetensors"])
    assert not (tiny_model / "policy.json").exists()
    assert seal_policy(str(policy), 7).fingerprint == read.fingerprint


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (("config.json",), "has no config.json"),
        (("model.safetensors",), r"has no \*\.safetensors weights"),
        (("tokenizer.json", "tokenizer_config.json"), "has no tokenizer"),
    ],
)
def test_incomplete_models_are_refused_by_name(tmp_path, tiny_model, missing, message):
    shutil.copytree(tiny_model, tmp_path / "model")
    for name in missing:
        (tmp_path / "model" / name).unlink()
    with pytest.raises(PolicyError, match=message):
        publish_initial_policy(str(tmp_path / "model"), str(tmp_path / "policy"))
    with pytest.raises(PolicyError, match="no such directory"):
        publish_initial_policy(str(tmp_path / "absent"), str(tmp_path / "policy"))
    assert not (tmp_path / "policy").exists()


def test_torn_and_damaged_policies_are_refused_by_file(policy):
    manifest = policy / "policy.json"
    content = manifest.read_text()
    for broken, message in (("{", "not a policy manifest"), ('{"version": 0}', "not a policy manifest")):
        manifest.write_text(broken)
        with pytest.raises(PolicyError, match=message):
            read_policy(str(policy))
    manifest.write_text(content)
    os.truncate(policy / "model.safetensors", 100)
    with pytest.raises(PolicyError, match=r"model\.safetensors: its content"):
        read_policy(str(policy), verify=True)
    (policy / "model.safetensors").unlink()
    with pytest.raises(PolicyError, match="not there"):
        read_policy(str(policy))
    manifest.unlink()
    with pytest.raises(PolicyError, match="never completely written"):
        read_policy(str(policy))


def test_a_manifest_cannot_name_a_file_outside_the_policy(policy):
    content = json.loads((policy / "policy.json").read_text())
    (policy / "policy.json").write_text(json.dumps(content | {"files": {"../policy/model.safetensors": "x"}}))
    with pytest.raises(PolicyError, match="not there"):
        read_policy(str(policy))

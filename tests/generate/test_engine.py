"""The real vLLM engine: what it samples, what it holds, what a cut does to it."""

import numpy as np
import pytest

from conftest import save_tiny_model
from tasks.config import SamplingConfig
from tasks.generate import weights
from tasks.generate.engine import EngineError, Request, warm_engine
from tasks.policy import publish_initial_policy, seal_policy
from tasks.trajectory import FinishReason

PROMPTS = [[2 + (7 * i + j) % 40 for j in range(3 + i % 5)] for i in range(32)]


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Versions 0 and 1: the same architecture with other weights."""
    directories = []
    for version in (0, 1):
        source = save_tiny_model(tmp_path_factory.mktemp("source"), seed=version)
        directory = str(tmp_path_factory.mktemp("policies") / str(version))
        publish_initial_policy(str(source), directory)
        seal_policy(directory, version)
        directories.append(directory)
    return directories


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    from conftest import recipe
    from tasks.config import RunConfig

    return RunConfig.model_validate(
        recipe(
            output=str(tmp_path_factory.mktemp("runs")),
            partial_rollout={"max_in_flight": 32},
            data={"max_prompt_tokens": 100},
        )
    )


def sampling(temperature=1.0, **settings):
    return SamplingConfig(temperature=temperature, max_response_tokens=48, **settings)


GREEDY = sampling(temperature=0.0)


def sample(engine, requests, settings, steps=None):
    """{request id: (tokens, logprobs, finish reason)} after `steps` engine steps, or at the end."""
    got = {request.request_id: ([], [], None) for request in requests}
    for request in requests:
        engine.admit(request, settings)
    while engine.in_flight and steps != 0:
        for delta in engine.step():
            tokens, logprobs, _ = got[delta.request_id]
            got[delta.request_id] = (tokens + delta.tokens, logprobs + delta.logprobs, delta.finish_reason)
        steps = None if steps is None else steps - 1
    engine.abort_all()
    return got


def requests(prompts=PROMPTS, max_tokens=40, seed=5):
    return [
        Request(str(i), np.array(prompt, np.int32), max_tokens, None if seed is None else seed + i)
        for i, prompt in enumerate(prompts)
    ]


def reference_logprobs(directory, prompt, response, temperature=1.0):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0] / temperature
    logprobs = torch.log_softmax(logits, -1)
    return [logprobs[len(prompt) - 1 + i, token].item() for i, token in enumerate(response)]


def test_greedy_decoding_cut_every_7_tokens_equals_no_cut_bit_for_bit(config, policies):
    engine = warm_engine(config, policies[0])
    whole = sample(engine, requests(), GREEDY)
    pieces = {str(i): ([], [], None) for i in range(len(PROMPTS))}
    while open_requests := [name for name, (_, _, reason) in pieces.items() if reason is None]:
        again = [
            Request(name, np.array([*PROMPTS[int(name)], *pieces[name][0]], np.int32), 40 - len(pieces[name][0]), 1)
            for name in open_requests
        ]
        for name, (tokens, logprobs, reason) in sample(engine, again, GREEDY, steps=7).items():
            pieces[name] = (pieces[name][0] + tokens, pieces[name][1] + logprobs, reason)
    assert {name: tokens for name, (tokens, _, _) in pieces.items()} == {
        name: tokens for name, (tokens, _, _) in whole.items()
    }
    for name, (_, logprobs, reason) in pieces.items():
        assert reason == whole[name][2]
        assert np.allclose(logprobs, whole[name][1], atol=1e-4)


def test_logprobs_are_of_the_distribution_sampled_from(config, policies):
    engine = warm_engine(config, policies[0])
    for temperature in (1.0, 0.5):
        got = sample(engine, requests(PROMPTS[:4]), sampling(temperature))
        for name, (tokens, logprobs, _) in got.items():
            expected = reference_logprobs(policies[0], PROMPTS[int(name)], tokens, temperature)
            assert np.allclose(logprobs, expected, atol=1e-4)


def test_seeded_requests_sample_the_same_whatever_else_is_in_the_batch(config, policies):
    engine = warm_engine(config, policies[0])
    together = sample(engine, requests(), sampling())
    alone = sample(engine, requests()[:1], sampling())
    assert alone["0"][0] == together["0"][0]
    assert together["0"][0] != together["5"][0]


def test_end_of_sequence_ends_and_is_kept_as_a_token(config, policies):
    engine = warm_engine(config, policies[0])
    whole = sample(engine, requests(), GREEDY)["3"][0]
    stop = whole[5]
    ended = sample(engine, requests(), sampling(temperature=0.0, stop_token_ids=(stop,)))["3"]
    assert ended[0] == whole[: whole.index(stop) + 1]
    assert ended[2] == FinishReason.STOP
    at_budget = sample(engine, requests(max_tokens=6), GREEDY)["3"]
    assert (at_budget[0], at_budget[2]) == (whole[:6], FinishReason.LENGTH)


def test_new_weights_use_nothing_of_the_old_ones(config, policies):
    """Same prompts under version 0 and then 1: as a fresh engine, no prefix and no matrix of version 0 is used."""
    engine = warm_engine(config, policies[0])
    long = [[2 + (3 * i + j) % 40 for j in range(100)] for i in range(4)]
    before = sample(engine, requests(long), sampling())
    assert warm_engine(config, policies[1]) is engine
    assert engine.version == 1
    after = sample(engine, requests(long), sampling())
    for name, (tokens, logprobs, _) in after.items():
        assert np.allclose(logprobs, reference_logprobs(policies[1], long[int(name)], tokens), atol=1e-4)
    assert {name: tokens for name, (tokens, _, _) in after.items()} != {
        name: tokens for name, (tokens, _, _) in before.items()
    }
    warm_engine(config, policies[0])
    assert sample(engine, requests(long), sampling()) == before


def test_abort_leaves_nothing_in_the_engines_own_books(config, policies):
    engine = warm_engine(config, policies[0])
    sample(engine, requests(), sampling(), steps=3)
    assert engine.in_flight == 0
    assert engine.step() == []


def test_weights_are_not_changed_under_running_requests(config, policies):
    engine = warm_engine(config, policies[0])
    engine.admit(requests()[0], sampling())
    with pytest.raises(EngineError, match="1 requests are in the engine"):
        engine.load(policies[1])
    engine.abort_all()
    assert engine.version == 0


def test_damaged_weights_are_never_sampled_from(config, policies, tmp_path):
    import shutil

    engine = warm_engine(config, policies[0])
    shutil.copytree(policies[1], tmp_path / "damaged")
    file = tmp_path / "damaged" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with pytest.raises(EngineError, match=r"model\.safetensors'\] are not those that were published"):
        engine.load(str(tmp_path / "damaged"))
    with pytest.raises(EngineError, match="holds no verified weights"):
        engine.admit(requests()[0], sampling())
    engine.load(policies[0])


def test_a_reload_that_skips_a_matrix_is_detected(config, policies, monkeypatch):
    """The fault of vLLM's CPU backend: a tied output matrix keeps its packed copy of the weights before."""
    engine = warm_engine(config, policies[0])
    monkeypatch.setattr(weights, "_repack_tied_head", lambda _: None)
    with pytest.raises(EngineError, match="still computes with other weights in lm_head"):
        engine.load(policies[1])
    assert engine.version is None
    monkeypatch.undo()
    engine.load(policies[1])
    assert engine.version == 1


def test_more_prompt_tokens_than_one_step_takes_are_sampled_all_the_same(config, policies):
    """Seeded requests whose prompts do not fit into one step together."""
    engine = warm_engine(config, policies[0])
    long = [[2 + (3 * i + j) % 40 for j in range(100)] for i in range(90)]
    assert sum(map(len, long)) > 2 * 4096
    assert {
        len(tokens) for tokens, _, reason in sample(engine, requests(long), sampling()).values() if reason == "length"
    } == {40}

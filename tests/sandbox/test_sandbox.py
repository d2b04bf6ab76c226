"""The sandbox's task, its shipped data and its shipped model."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tasks.sandbox.problems as problems_module
from tasks.rewards.sums import compute_score
from tasks.sandbox.pretrain import build_model, build_tokenizer, chance_of_no_slip, pretrain, solved_sums
from tasks.sandbox.problems import SCHEMA, heldout_problems, problems, solution, train_problems

SANDBOX = Path(problems_module.__file__).parent
MODEL = SANDBOX / "model"


def shipped(name):
    return pq.read_table(SANDBOX / f"{name}.parquet")


def prompts(rows):
    return [row["prompt"][0]["content"] for row in rows]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL)


@pytest.mark.parametrize(("name", "generate"), [("train", train_problems), ("heldout", heldout_problems)])
def test_shipped_data_is_what_the_generator_makes(name, generate):
    table = shipped(name)
    assert table.schema.equals(SCHEMA)
    assert table.to_pylist() == generate()


def test_same_seed_gives_same_problems_and_another_seed_others():
    assert problems(20, seed=5) == problems(20, seed=5)
    assert prompts(problems(20, seed=5)) != prompts(problems(20, seed=6))


def test_prompts_are_distinct_and_heldout_ones_are_never_trained_on():
    train, heldout = prompts(shipped("train").to_pylist()), prompts(shipped("heldout").to_pylist())
    assert (len(set(train)), len(set(heldout))) == (4096, 256)
    assert not set(train) & set(heldout)


def test_ground_truth_is_the_sum_modulo_ten():
    for row in shipped("train").to_pylist() + shipped("heldout").to_pylist():
        terms = [int(term) for term in row["prompt"][0]["content"].rstrip("=").split("+")]
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(sum(terms) % 10)}
        assert row["extra_info"]["terms"] == len(terms)
        assert row["data_source"] == "sandbox/sums"


def test_solution_reduces_the_first_two_terms_at_each_step():
    assert solution([8, 4, 6, 4]) == "2+6+4;8+4;2"
    assert solution([9, 9, 9]) == "8+9;7"


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_response_lengths_have_a_heavy_tail(name):
    terms = np.array([row["extra_info"]["terms"] for row in shipped(name).to_pylist()])
    tokens = terms * (terms - 1)  # with the end-of-sequence token
    assert 30 <= np.median(tokens) <= 60
    assert np.percentile(tokens, 95) >= 5 * np.median(tokens)
    assert tokens.max() <= 380


@pytest.mark.parametrize(
    ("response", "ground_truth", "score"),
    [
        ("2+6+4;8+4;2", "2", 1.0),
        ("2+6+4;8+4;3", "2", 0.0),
        ("9+9;1;2", "2", 1.0),  # only the answer counts
        ("2", "2", 1.0),
        ("2+6+4;8+4; 2\n", "2", 1.0),
        ("2+6+4;8+4;", "2", 0.0),
        ("2+6+4;8+4;22", "2", 0.0),
        ("2+6+4;8+4", "4", 0.0),  # cut off before the answer
        ("", "2", 0.0),
    ],
)
def test_reward_is_one_exactly_for_the_right_answer(response, ground_truth, score):
    assert compute_score("sandbox/sums", response, ground_truth)["accuracy"] == score
    assert compute_score("sandbox/sums", response, ground_truth, {"index": 0, "terms": 4})["accuracy"] == score


def test_tokenizer_has_one_token_per_character_and_decodes_to_the_same_text(tokenizer):
    text = "8+4+6+4=2+6+4;8+4;2"
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([*tokens, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer("12 \n?")["input_ids"][2:] == [tokenizer.unk_token_id] * 3


def test_chat_template_is_the_contents_and_nothing_else(tokenizer):
    messages = [{"role": "user", "content": "8+4+6+4="}]
    tokens = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert tokens == tokenizer("8+4+6+4=")["input_ids"]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "8+4+6+4="


def test_shipped_tokenizer_is_the_one_the_code_builds(tokenizer):
    built = build_tokenizer()
    assert tokenizer.get_vocab() == built.get_vocab()
    assert tokenizer.backend_tokenizer.to_str() == built.backend_tokenizer.to_str()


def test_pretraining_text_is_prompt_and_solution_in_the_tokenizer_s_tokens(tokenizer):
    for row in solved_sums(np.random.default_rng(0), 8, terms=5, corrupted=0.0):
        prompt, response = tokenizer.decode(row).split("=")
        right = solution([int(term) for term in prompt.split("+")])
        assert response == right + tokenizer.eos_token


def test_corruption_makes_the_given_share_of_steps_wrong():
    tokens = solved_sums(np.random.default_rng(0), 4000, terms=3, corrupted=0.25)
    digits = tokens - tokens.min(dim=0).values  # of columns that hold digits, the digit: 0 occurs in each
    first_step_wrong = (digits[:, 0] + digits[:, 2]) % 10 != digits[:, 6]
    second_step_wrong = (digits[:, 6] + digits[:, 8]) % 10 != digits[:, 10]
    assert first_step_wrong.float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert second_step_wrong.float().mean().item() == pytest.approx(0.25, abs=0.03)


def test_excluded_sums_are_never_made():
    excluded = {(a, b, c) for a in range(5) for b in range(10) for c in range(10)}
    tokens = solved_sums(np.random.default_rng(0), 400, terms=3, corrupted=0.0, exclude=excluded)
    assert 100 < len(tokens) < 300
    assert not {tuple(row) for row in (tokens[:, [0, 2, 4]] - 3).tolist()} & excluded


def test_shipped_model_is_small_and_knows_where_to_stop(model, tokenizer):
    assert (MODEL / "model.safetensors").stat().st_size <= 4_000_000
    assert model.dtype == torch.float32
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert len(tokenizer) <= model.config.vocab_size


def test_shipped_model_gives_finite_logits(model, tokenizer):
    tokens = tokenizer("8+4+6+4=2+6+4;8+4;2", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(tokens).logits
    assert logits.shape == (1, 19, model.config.vocab_size)
    assert torch.isfinite(logits).all()


def test_shipped_model_s_likeliest_tokens_solve_a_sum_to_the_end(model, tokenizer):
    prompt = tokenizer("8+4+6+4=", return_tensors="pt")
    tokens = model.generate(**prompt, do_sample=False, temperature=None, top_k=None, top_p=None, max_new_tokens=32)
    assert tokenizer.decode(tokens[0, 8:]) == "2+6+4;8+4;2" + tokenizer.eos_token


def test_shipped_model_slips_more_often_the_longer_the_sum(model):
    short, middle, long = (chance_of_no_slip(model, terms) for terms in (3, 7, 14))
    assert 0.9 > short > middle > long > 0.02


def test_a_few_steps_of_pretraining_lower_the_loss_reproducibly():
    losses = pretrain(build_model(seed=3), steps=12, seed=3)
    assert losses[0] == pytest.approx(np.log(32), abs=0.2)
    assert np.mean(losses[-3:]) < losses[0] - 0.3
    assert pretrain(build_model(seed=3), steps=3, seed=3)[0] == losses[0]

"""Ids in, ids out: what goes to the engine and to the scorer, with a real byte-level BPE tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tasks.config import RewardConfig, SamplingConfig
from tasks.generate.rollout import Sampler
from tasks.rewards.scoring import Scorer
from tasks.trajectory import FinishReason, Trajectory, extend

TEXT = "naïve 数学 😀 the theory of the thing: π ≈ 3.14159, ½ + ⅓ = ⅚. "


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(["the theory of the thing is nothing"] * 50, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


def echo(data_source, solution_str, ground_truth, extra_info):
    SEEN.append(solution_str)
    return 1.0


SEEN: list[str] = []


def test_the_tokenizer_has_tokens_inside_characters_and_mergeable_pairs(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert any("�" in tokenizer.decode(ids[: cut + 1]) for cut in range(len(ids)))
    split = [tokenizer.encode(TEXT[:cut]) + tokenizer.encode(TEXT[cut:]) for cut in range(len(TEXT))]
    assert any(pieces != ids for pieces in split)


@given(cuts=st.lists(st.integers(0, 60), max_size=6))
def test_cuts_inside_characters_and_pairs_change_neither_ids_nor_text(tokenizer, cuts):
    sampler = Sampler(SamplingConfig(max_response_tokens=500), 1, tokenizer, {})
    ids = tokenizer.encode(TEXT)
    prompt = tokenizer.encode("π?")
    row = Trajectory("g", 0, "g", "test", "", prompt, 0)
    done = 0
    for version, cut in enumerate(sorted({min(cut, len(ids) - 1) for cut in cuts})):
        row = extend(row, ids[done:cut], [-0.5] * (cut - done), version)
        request = sampler.request(row)
        assert request.tokens.tolist() == prompt + ids[:cut]
        assert request.max_tokens == 500 - cut
        done = cut
    row = extend(row, ids[done:], [-0.5] * (len(ids) - done), 9, FinishReason.STOP, iteration=9)
    SEEN.clear()
    with Scorer(RewardConfig(function="test_rollout:echo", workers=0, overlong_cache=0), 500) as scorer:
        sampler.submit(row, scorer)
    assert [TEXT] == SEEN


def test_seeds_differ_between_members_attempts_and_positions_and_repeat_otherwise(tokenizer):
    sampler = Sampler(SamplingConfig(max_response_tokens=500), 1, tokenizer, {})
    first = Trajectory("g", 0, "g", "test", "", [1], 0)
    later = extend(first, [5, 6], [-1.0, -1.0], 0)
    seeds = [sampler.request(row).seed for row in (first, later, first.restarted(), later.restarted())]
    assert len(set(seeds)) == 3
    assert seeds[2] == seeds[3]
    assert sampler.request(first).seed == seeds[0]
    unseeded = Sampler(SamplingConfig(max_response_tokens=500, seed_requests=False), 1, tokenizer, {})
    assert unseeded.request(first).seed is None

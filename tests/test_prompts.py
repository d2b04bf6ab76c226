"""Prompts: verl's schema, clear refusals, and an order in which none is skipped or repeated within an epoch."""

import json
from collections import Counter

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import write_prompts
from tasks.config import DataConfig, PromptSource
from tasks.prompt_files import DataError
from tasks.prompts import Draws, Prompt, PromptSet, load_prompts, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(str(tiny_model))


def load(path, tokenizer, limit=16, source=None, **settings):
    data = DataConfig(train="unused", max_prompt_tokens=limit, **settings)
    return load_prompts(PromptSource(path=str(path), **(source or {})), tokenizer, data)


def test_jsonl_parquet_and_urls_read_alike(tmp_path, tokenizer):
    path = write_prompts(tmp_path / "a.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with fsspec.open("memory://prompts/a.jsonl", "wb") as file:
        file.write(path.read_bytes())
    sets = [
        load(source, tokenizer)
        for source in (path, tmp_path / "a.parquet", "memory://prompts/a.jsonl", f"file://{path}")
    ]
    assert len({prompts.fingerprint for prompts in sets}) == 1
    first = sets[0].prompts[3]
    assert tokenizer.decode(first.tokens) == "3 + 3 ="
    assert (first.ground_truth, first.extra_info) == ("6", {"index": 3})


def test_prompts_over_the_limit_are_dropped_and_counted(tmp_path, tokenizer):
    path = write_prompts(tmp_path / "a.jsonl", 12)
    prompts = load(path, tokenizer, limit=4)
    assert (len(prompts.prompts), prompts.too_long) == (10, 2)
    with pytest.raises(DataError, match=r"all 12 prompts are longer than data.max_prompt_tokens = 3"):
        load(path, tokenizer, limit=3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("", "has no rows"),
        ("{]\n", "row 0 is not JSON"),
        ("[1]\n", "row 0 is not an object"),
        ('{"data_source": "a", "prompt": []}\n', "row 0: missing column reward_model"),
        ('{"data_source": "a", "prompt": [], "reward_model": {"ground_truth": "1"}}\n', "row 0 has an empty prompt"),
        (
            '{"data_source": "a", "prompt": [{"role": "user", "content": "1"}], "reward_model": {}}\n',
            "row 0 has no reward_model.ground_truth",
        ),
        (
            '{"data_source": "a", "prompt": [3], "reward_model": {"ground_truth": "1"}}\n',
            "row 0: prompt must be a list of chat messages",
        ),
    ],
)
def test_bad_data_is_refused_by_file_row_and_column(tmp_path, tokenizer, content, message):
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message) as error:
        load(path, tokenizer)
    assert "bad.jsonl" in str(error.value)


def test_parquet_faults_are_refused(tmp_path, tokenizer):
    pq.write_table(pa.table({"data_source": ["a"], "prompt": ["b"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="missing column reward_model"):
        load(tmp_path / "a.parquet", tokenizer)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"b.parquet: cannot be read as parquet"):
        load(tmp_path / "b.parquet", tokenizer)
    with pytest.raises(DataError, match=r"give a .parquet or .jsonl file"):
        load(tmp_path / "c.csv", tokenizer)


def test_model_without_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path))


def draws(count, cursor=0, seed=1):
    prompts = [Prompt(str(i), "test", "", np.array([i], np.int32), {}) for i in range(count)]
    return Draws(
        [PromptSet(PromptSource(path="test"), tuple(prompts), "")], cursor=cursor, seed=seed, shuffle=True, group_size=2
    )


@given(count=st.integers(1, 9), stops=st.lists(st.integers(0, 12), max_size=6), seed=st.integers(0, 3))
def test_each_prompt_is_drawn_once_per_epoch_across_stops(count, stops, seed):
    """Every stop makes a new `Draws` from the cursor alone, as a killed and resumed run does."""
    drawn, cursor = [], 0
    for stop in stops:
        source = draws(count, cursor, seed)
        drawn += [source.draw(0)[0].group_id for _ in range(stop)]
        cursor = source.cursor
    assert len(set(drawn)) == len(drawn)
    for epoch in range(len(drawn) // count):
        prompts = Counter(name.split(".")[0] for name in drawn[epoch * count : (epoch + 1) * count])
        assert prompts == {str(i): 1 for i in range(count)}
    uninterrupted = draws(count, 0, seed)
    assert drawn == [uninterrupted.draw(0)[0].group_id for _ in drawn]


def test_epochs_are_shuffled_anew():
    source = draws(50)
    orders = [[source.draw(0)[0].prompt_id for _ in range(50)] for _ in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])

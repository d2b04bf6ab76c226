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


def columns_of(rows):
    return [(prompt.ground_truth, prompt.data_source, prompt.tokens.tolist()) for prompt in rows.prompts]


def test_prompts_as_json_text_and_as_numpy_typed_columns_read_as_structures_do(tmp_path, tokenizer):
    rows = [json.loads(line) for line in write_prompts(tmp_path / "a.jsonl").read_text().splitlines()]
    structures = ("prompt", "reward_model", "extra_info")
    as_text = [row | {name: json.dumps(row[name]) for name in structures} for row in rows]
    pq.write_table(pa.Table.from_pylist(as_text), tmp_path / "text.parquet")
    frame = pa.Table.from_pylist(rows).to_pandas()  # lists become arrays of objects, as verl's own scripts write them
    frame["prompt"] = [np.array(prompt, dtype=object) for prompt in frame["prompt"]]
    frame.to_parquet(tmp_path / "numpy.parquet")
    plain = load(tmp_path / "a.jsonl", tokenizer)
    for name in ("text.parquet", "numpy.parquet"):
        read = load(tmp_path / name, tokenizer)
        assert columns_of(read) == columns_of(plain)
        assert [prompt.extra_info for prompt in read.prompts] == [prompt.extra_info for prompt in plain.prompts]


def test_what_the_datasets_library_saved_is_read(tmp_path, tokenizer):
    datasets = pytest.importorskip("datasets")
    rows = [json.loads(line) for line in write_prompts(tmp_path / "a.jsonl", 8).read_text().splitlines()]
    whole = datasets.Dataset.from_list(rows)
    whole.save_to_disk(tmp_path / "saved", num_shards=3)
    datasets.DatasetDict({"train": whole, "test": whole.select([1])}).save_to_disk(tmp_path / "splits")
    plain = load(tmp_path / "a.jsonl", tokenizer)
    assert columns_of(load(tmp_path / "saved", tokenizer)) == columns_of(plain)
    assert columns_of(load(tmp_path / "splits" / "test", tokenizer)) == columns_of(plain)[1:2]
    with pytest.raises(DataError, match=r"holds the splits train, test; name one, e.g. .*splits/train"):
        load(tmp_path / "splits", tokenizer)


def test_a_folder_is_all_its_files_in_the_order_of_their_names(tmp_path, tokenizer):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(DataError, match=r"the folder holds no .parquet, .jsonl, .arrow file, but nothing"):
        load(folder, tokenizer)
    write_prompts(folder / "b.jsonl", 2)
    write_prompts(folder / "a.jsonl", 3)
    (folder / "README.md").write_text("not prompts")
    assert [prompt.ground_truth for prompt in load(folder, tokenizer).prompts] == ["0", "2", "4", "0", "2"]


def test_other_columns_are_named_by_the_recipe(tmp_path, tokenizer):
    path = tmp_path / "gsm.jsonl"
    path.write_text(json.dumps({"question": "1+2=", "answer": "so\n#### 3"}) + "\n")
    source = {"columns": {"prompt": "question", "ground_truth": "answer"}}
    (prompt,) = load(path, tokenizer, source=source).prompts
    assert (tokenizer.decode(prompt.tokens), prompt.ground_truth, prompt.data_source) == (
        "1 + 2 =",
        "so\n#### 3",
        "gsm",
    )
    with pytest.raises(DataError, match=r"row 0: missing column problem; .* this row has question, answer"):
        load(path, tokenizer, source={"columns": {"prompt": "problem", "ground_truth": "answer"}})
    with pytest.raises(DataError, match=r"missing column data_source, prompt, reward_model|missing column prompt"):
        load(path, tokenizer)


def test_system_prompt_and_template_options_reach_the_template(tmp_path, tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'][:1] }}={{ message['content'] }};{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}"
    )
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "1"}]
    path = write_prompts(tmp_path / "a.jsonl", 1)
    path.write_text(path.read_text() + write_prompts(tmp_path / "b.jsonl", 1, prompt=own).read_text())

    def shown(**settings):
        return [
            tokenizer.decode(prompt.tokens).replace(" ", "") for prompt in load(path, tokenizer, **settings).prompts
        ]

    assert shown() == ["u=0+0=;", "s=own;u=1;"]
    assert shown(system_prompt="add") == ["s=add;u=0+0=;", "s=own;u=1;"]
    assert shown(template_options={"enable_thinking": False}) == ["u=0+0=;no", "s=own;u=1;no"]


def test_a_template_that_cannot_render_is_named_with_its_row(tmp_path, tokenizer):
    path = write_prompts(tmp_path / "a.jsonl", 1)
    tokenizer.chat_template, before = "{{ raise_exception('roles must alternate') }}", tokenizer.chat_template
    with pytest.raises(
        DataError, match=r"a.jsonl: row 0: the chat template cannot render prompt: roles must alternate"
    ):
        load(path, tokenizer)
    tokenizer.chat_template = before


def test_a_missing_bos_is_noticed_and_added_or_left_out_by_choice(tmp_path, tiny_model):
    path = write_prompts(tmp_path / "a.jsonl", 1)
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    with pytest.raises(DataError, match=r"row 0: .* without the tokenizer's beginning-of-sequence token '<bos>'"):
        load(path, tokenizer)
    left_out = load(path, tokenizer, add_bos=False).prompts[0].tokens.tolist()
    assert load(path, tokenizer, add_bos=True).prompts[0].tokens.tolist() == [tokenizer.bos_token_id, *left_out]
    tokenizer.chat_template = "<bos>" + tokenizer.chat_template
    for choice in (None, True):
        assert load(path, tokenizer, add_bos=choice).prompts[0].tokens.tolist() == [tokenizer.bos_token_id, *left_out]


def test_duplicates_are_kept_or_dropped_and_contradictions_among_them_counted(tmp_path, tokenizer):
    path = write_prompts(tmp_path / "a.jsonl", 3)
    again = path.read_text()
    path.write_text(again + again + again.replace('"ground_truth": "4"', '"ground_truth": "5"'))
    assert len(load(path, tokenizer).prompts) == 9
    dropped = load(path, tokenizer, duplicates="drop")
    assert [prompt.ground_truth for prompt in dropped.prompts] == ["0", "2", "4"]
    assert (dropped.duplicates, dropped.contradictions) == (6, 1)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    weights=st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.0]), min_size=3, max_size=3),
    stop=st.integers(0, 40),
    shuffle=st.booleans(),
)
def test_an_epoch_draws_each_set_by_its_weight_and_no_group_twice(sizes, weights, stop, shuffle):
    sets = [
        PromptSet(
            PromptSource(path=f"{name}.jsonl", weight=weight),
            tuple(Prompt(f"{name}-{i}", name, "", np.array([i], np.int32), {}) for i in range(size)),
            name,
        )
        for name, size, weight in zip("abc", sizes, weights, strict=False)
    ]
    settings = {"seed": 1, "shuffle": shuffle, "group_size": 2}
    epoch = sum(each.draws_per_epoch for each in sets)
    source = Draws(sets, cursor=0, **settings)
    drawn = [source.draw(0)[0] for _ in range(4 * epoch)]
    assert len({row.group_id for row in drawn}) == len(drawn)
    for start in range(0, 4 * epoch, epoch):
        counts = Counter(row.data_source for row in drawn[start : start + epoch])
        assert counts == {each.fingerprint: max(1, round(each.source.weight * len(each.prompts))) for each in sets}
    for each in sets:  # over epochs every prompt of a set has been drawn as often as any other, give or take one
        counts = Counter(row.prompt_id for row in drawn if row.data_source == each.fingerprint)
        times = [counts[prompt.prompt_id] for prompt in each.prompts]
        assert max(times) - min(times) <= 1
    stop = min(stop, len(drawn))
    resumed = Draws(sets, cursor=stop, **settings)
    assert [resumed.draw(0)[0].group_id for _ in drawn[stop:]] == [row.group_id for row in drawn[stop:]]

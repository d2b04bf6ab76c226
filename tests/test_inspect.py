"""What `python -m tasks.inspect` prints, and that the readers of others read the shards."""

import glob

import pytest

from rows import group, row
from tasks.carry_over.shards import write_shards
from tasks.inspect import main
from tasks.policy import publish_initial_policy

ROWS = [
    *group("a", [0.0, 1.0], segments=[(4, 2), (6, 3)], iteration=2),
    row("b", 0, segments=[(30, 1), (12, 2), (7, 3)], resumes=2, iteration=1),
    row("b", 1),
]
LEDGER = {
    "groups": {"carried_in": 0, "entered": 7, "trained": 5, "carried_out": 2},
    "tokens": {"carried_in": 0, "entered": 1234, "trained": 1165, "carried_out": 69},
}


@pytest.fixture
def carry(tmp_path):
    directory = str(tmp_path / "run" / "carry" / "0004")
    write_shards(ROWS, directory, cursor=7, extra={"iteration": 3, "ledger": LEDGER})
    return directory


def printed(capsys, *arguments):
    main(list(arguments))
    return " ".join(capsys.readouterr().out.split())


def test_a_carry_is_counted_by_state_version_and_length(carry, capsys):
    text = printed(capsys, carry)
    assert "4 trajectories of 2 groups, 69 response tokens in 1 files; next prompt is draw 7" in text
    assert "partial 1 49" in text
    assert "pending 1 0" in text
    assert "scored 2 20" in text
    assert "1 2 30 1" in text  # version 1: lag 2, 30 tokens, 1 trajectory began with it
    assert "3 0 19 0" in text
    assert "least 0, median 10" in text
    assert "oldest: b/0, drawn in iteration 1, partial, 30 tokens by version 1 + 12 tokens by version 2" in text
    assert "entered 7 1,234" in text


def test_a_trajectory_is_shown_with_its_segments(carry, capsys):
    text = printed(capsys, carry, "--trajectory", "b/0")
    assert "resumes: 2" in text
    assert "0 30 1 -0.5000" in text
    assert "42 7 3 -0.5000" in text


def test_text_is_decoded_with_the_newest_policy_of_the_run(carry, capsys, tiny_model, tmp_path):
    publish_initial_policy(str(tiny_model), str(tmp_path / "run" / "policy" / "0000"))
    text = printed(capsys, carry, "--trajectory", "a/0")
    assert "0 1" in text.split("Segments")[1]  # the prompt's ids 2 and 3 are the characters 0 and 1


def test_rows_that_were_put_aside_are_named(carry, capsys):
    import dataclasses

    broken = dataclasses.replace(ROWS[0], segments=((0, 3, 2),))
    write_shards([broken, *ROWS[1:]], carry)
    assert "put aside: (never written) row 0, a/0, 10 tokens: segments cover 3 of 10" in printed(capsys, carry)


def test_a_carry_in_an_object_store_is_read_where_it_is(s3, capsys):
    write_shards(ROWS, f"{s3}/carry/0004", cursor=7)
    assert "4 trajectories of 2 groups" in printed(capsys, f"{s3}/carry/0004")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["absent"], "absent/manifest.json: missing"), (["{carry}", "--trajectory", "c/9"], "has no trajectory c/9")],
)
def test_what_is_not_there_is_said(carry, arguments, message):
    with pytest.raises(SystemExit, match=message):
        main([argument.format(carry=carry) for argument in arguments])


def test_pyarrow_polars_and_duckdb_read_the_shards(carry):
    import duckdb
    import polars
    import pyarrow as pa

    (file,) = glob.glob(f"{carry}/*.arrow")
    rows_read = pa.ipc.open_file(file).read_all()
    frame = polars.read_ipc(file)
    counted = duckdb.sql("SELECT status, count(*), sum(len(response_tokens)) FROM rows_read GROUP BY ALL ORDER BY ALL")
    assert rows_read["status"].to_pylist() == frame["status"].to_list() == [str(row.status) for row in ROWS]
    assert frame["segments"].list.len().to_list() == [len(row.segments) for row in ROWS]
    assert counted.fetchall() == [("partial", 1, 49), ("pending", 1, 0), ("scored", 2, 20)]

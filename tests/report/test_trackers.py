"""The real trackers, offline: the same metric names in each, and none that can stop a run."""

import json
import socket
import struct
import time

import pytest

from conftest import recipe
from tasks.config import RunConfig
from tasks.report import trackers
from tasks.report.trackers import end_tracking, track

VALUES = [
    {"iteration": 0.0, "carry/reward": 0.25, "train/loss": -0.5, "carry/accuracy": float("nan")},
    {"iteration": 1.0, "carry/reward": 0.75, "train/loss": -0.25},
]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(trackers, "_open", {})
    monkeypatch.setattr(trackers, "_given_up", set())


def config_for(folder, *use, **settings):
    return RunConfig.model_validate(recipe(output=str(folder), name="run", trackers={"use": use, **settings}))


def record(config):
    for values in VALUES:
        track(config, values)
    end_tracking()


def test_tensorboard_has_every_metric_by_its_name_and_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record(config_for(tmp_path, "tensorboard"))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert {"carry/reward", "train/loss"} <= set(events.Tags()["scalars"])
    assert "carry/accuracy" not in events.Tags()["scalars"]
    assert [(event.step, event.value) for event in events.Scalars("carry/reward")] == [(0, 0.25), (1, 0.75)]


def test_tensorboard_files_reach_an_object_store(s3, tmp_path):
    import fsspec

    record(config_for(s3, "tensorboard"))
    assert fsspec.filesystem("s3").glob(f"{s3}/run/tensorboard/*tfevents*")


def test_mlflow_has_every_metric_by_its_name_and_step_in_one_run(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    config = config_for(tmp_path, "mlflow", project="sums")
    track(config, VALUES[0])
    trackers._open.clear()  # the next iteration is recorded by another process
    track(config, VALUES[1])
    end_tracking()
    client = MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert len(runs) == 1
    history = client.get_metric_history(runs[0].info.run_id, "carry/reward")
    assert sorted((metric.step, metric.value) for metric in history) == [(0, 0.25), (1, 0.75)]


def offline_records(content):
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    position, record = 7, b""
    while position + 7 <= len(content):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, or the last part
            yield record
            record = b""


def test_wandb_offline_has_every_metric_by_its_name_and_step(tmp_path, monkeypatch):
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    record(config_for(tmp_path, "wandb"))
    (file,) = (tmp_path / "run" / "wandb").glob("**/*.wandb")
    found = []
    for data in offline_records(file.read_bytes()):
        message = wandb_internal_pb2.Record.FromString(data)
        if message.WhichOneof("record_type") == "history":
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in message.history.item
            }
            found.append((values["_step"], values["carry/reward"], values["train/loss"]))
    assert found == [(0, 0.25, -0.5), (1, 0.75, -0.25)]


def test_a_tracker_that_cannot_be_reached_is_named_once_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    record(config_for(tmp_path, "mlflow", "tensorboard"))
    assert capsys.readouterr().out.count("tracker mlflow is left out from now on, the run goes on") == 1
    assert list((tmp_path / "run" / "tensorboard").glob("*tfevents*"))


def test_a_tracker_that_never_answers_is_given_up_in_time(tmp_path, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        record(config_for(tmp_path, "mlflow", timeout_seconds=0.5))
        assert time.monotonic() - began < 30
    assert "tracker mlflow is left out from now on, the run goes on" in capsys.readouterr().out


def test_a_tracker_that_is_not_installed_is_named_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    record(config_for(tmp_path, "tensorboard"))
    assert "tracker tensorboard is left out from now on" in capsys.readouterr().out

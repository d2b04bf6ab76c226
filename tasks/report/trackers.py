"""Experiment trackers: Weights & Biases, MLflow and TensorBoard get the metrics of every iteration, by their own names.

Whatever a tracker does, the run goes on: one that fails or hangs is named once and left out from then on. Iterations
may be recorded by different processes (on a cluster each by its own pod): each continues the same tracked run.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import fsspec

from tasks.config import RunConfig
from tasks.report.progress import say
from tasks.storage import is_local


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one iteration; they are where they belong when this returns."""

    def close(self) -> None:
        """The run has ended."""


class WandbTracker:
    def __init__(self, config: RunConfig) -> None:
        import wandb

        self._run = wandb.init(
            project=config.trackers.project,
            name=config.name,
            id=_run_id(config),
            resume="allow",
            config=config.model_dump(mode="json"),
            dir=_local_folder(config, "wandb"),
            settings=wandb.Settings(silent=True, init_timeout=config.trackers.timeout_seconds),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflowTracker:
    def __init__(self, config: RunConfig) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = MlflowClient()
        experiment = self._client.get_experiment_by_name(config.trackers.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(config.trackers.project)
        identity = _run_id(config)
        known = self._client.search_runs([number], f"tags.carryover = '{identity}'")
        if known:
            self._run = known[0].info.run_id
        else:
            run = self._client.create_run(number, run_name=config.name, tags={"carryover": identity})
            self._run = run.info.run_id
            self._client.log_dict(self._run, config.model_dump(mode="json"), "recipe.yaml")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._metric(name, value, 0, step) for name, value in metrics.items()]
        self._client.log_batch(self._run, metrics=values)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class TensorBoardTracker:
    """Event files in `<run>/tensorboard`."""

    def __init__(self, config: RunConfig) -> None:
        from tensorboardX import SummaryWriter

        self._place = f"{config.run_directory}/tensorboard"
        self._folder = _local_folder(config, "tensorboard")
        self._writer = SummaryWriter(self._folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
        if not is_local(self._place):
            filesystem, root = fsspec.core.url_to_fs(self._place)
            filesystem.put(f"{self._folder}/", f"{root}/", recursive=True)

    def close(self) -> None:
        self._writer.close()


_KINDS: dict[str, Callable[[RunConfig], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MLflowTracker,
    "tensorboard": TensorBoardTracker,
}
_open: dict[tuple[str, str], Tracker] = {}  # by kind and run, warm between the iterations of this process
_given_up: set[tuple[str, str]] = set()


def track(config: RunConfig, metrics: Mapping[str, float]) -> None:
    """Give one iteration's metrics to every tracker of the recipe. Never raises and never takes long."""
    step = int(metrics["iteration"])
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    for kind in config.trackers.use:
        key = (kind, config.run_directory)

        def log(kind: str = kind, key: tuple[str, str] = key) -> None:
            if key not in _open:
                _open[key] = _KINDS[kind](config)
            _open[key].log(step, finite)

        if key not in _given_up and not _attempt(kind, log, config.trackers.timeout_seconds):
            _given_up.add(key)


def end_tracking() -> None:
    """Close every tracker of this process."""
    for (kind, _), tracker in _open.items():
        _attempt(kind, tracker.close, 30.0)
    _open.clear()


def _attempt(kind: str, action: Callable[[], Any], seconds: float) -> bool:
    """Whether the action ended well in time. Its thread is left behind if it hangs, and does not keep the process."""
    outcome: list[str] = []

    def run() -> None:
        try:
            action()
            outcome.append("")
        except BaseException as error:  # a tracker may even call exit
            outcome.append(f"{type(error).__name__}: {error}".splitlines()[0])

    thread = threading.Thread(target=run, daemon=True, name=f"tracker {kind}")
    thread.start()
    thread.join(seconds)
    problem = outcome[0] if outcome else f"no answer within {seconds:.0f} s"
    if problem:
        say(f"tracker {kind} is left out from now on, the run goes on: {problem}")
    return not problem


def _run_id(config: RunConfig) -> str:
    """The same for every process of a run, and for its resumptions."""
    return hashlib.sha256(config.run_directory.encode()).hexdigest()[:16]


def _local_folder(config: RunConfig, name: str) -> str:
    place = f"{config.run_directory}/{name}"
    if not is_local(place):
        return tempfile.mkdtemp(prefix=f"{name}-")
    folder = Path(place.removeprefix("file://"))
    os.makedirs(folder, exist_ok=True)
    return str(folder)

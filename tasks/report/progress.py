"""Live progress of a stage: one bar on a terminal, a plain line now and then otherwise."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

PLAIN_LINE_SECONDS = 15.0

Update = Callable[[float, str], None]


def say(line: str) -> None:
    """One line of a run's plain output."""
    print(line, flush=True)


@contextmanager
def chatter_to(log: Path) -> Iterator[None]:
    """What libraries write to standard error meanwhile goes to the end of `log`, also from native code and children.

    When the stage fails, the place of the log is said.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    screen = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    except BaseException:
        say(f"the stage failed; what the libraries said meanwhile is in {log}")
        raise
    finally:
        sys.stderr.flush()
        os.dup2(screen, 2)
        os.close(screen)


@contextmanager
def stage_progress(stage: str, total: float) -> Iterator[Update]:
    """Yields `update(done, text)`; `done` counts up to `total`. The bar vanishes when the stage ends."""
    console = Console()
    if not console.is_terminal or os.environ.get("CI"):
        yield _plain_updates(stage, total)
        return
    columns = (
        TextColumn("{task.description:<11}"),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task(stage, total=total, text="")
        yield lambda done, text: bar.update(task, completed=min(done, total), text=text)


def _plain_updates(stage: str, total: float) -> Update:
    last = time.monotonic()

    def update(done: float, text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_LINE_SECONDS:
            last = time.monotonic()
            say(f"{stage}: {done:.0f} of {total:.0f}, {text}")

    return update

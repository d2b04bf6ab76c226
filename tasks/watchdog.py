"""Ends a stage that no longer makes progress, with a named cause, instead of letting it hold its machines for ever."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tasks.faults import RecoverableError
from tasks.report.progress import say

GRACE_SECONDS = 10.0  # for the exception to get through, before the process is ended from outside the interpreter


class StallError(RecoverableError):
    """A stage made no progress for `stall_seconds`; the message names it, its log has the stack of every thread."""


@contextmanager
def watchdog(stage: str, stall_seconds: float) -> Iterator[Callable[[], None]]:
    """Yields `beat()`, to be called whenever the stage gets on. Raises StallError in the main thread when it does not.

    To be entered in the main thread, where tasks run.

    Where the main thread is in native code that does not return, even one that holds the interpreter's lock, the
    process is ended instead, GRACE_SECONDS later, with every stack in the log.
    """
    last = time.monotonic()
    ended = threading.Event()
    every = min(1.0, stall_seconds / 10)

    def end_process_later() -> None:
        # faulthandler waits outside the interpreter
        faulthandler.dump_traceback_later(stall_seconds + GRACE_SECONDS, exit=True, file=sys.__stderr__)

    def beat() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > every:
            last = now
            end_process_later()

    def watch() -> None:
        while not ended.wait(every):
            if time.monotonic() - last > stall_seconds:
                say(f"{stage}: no progress for {stall_seconds:.0f} s, ending it")
                faulthandler.dump_traceback(file=sys.__stderr__)
                signal.pthread_kill(main, signal.SIGUSR1)
                return

    def interrupt(_number: int, _frame: object) -> None:
        raise StallError(
            f"{stage} made no progress for stall_seconds = {stall_seconds:.0f}; where every thread was is in the log. "
            "What was saved before is kept, and a retry goes on from there"
        )

    main = threading.main_thread().ident
    before = signal.signal(signal.SIGUSR1, interrupt)
    end_process_later()
    thread = threading.Thread(target=watch, daemon=True, name=f"watchdog {stage}")
    thread.start()
    try:
        yield beat
    finally:
        ended.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGUSR1, before)

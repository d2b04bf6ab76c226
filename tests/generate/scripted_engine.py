"""An engine with a script: each member's response is known beforehand, one token a step. For the scheduler's tests."""

from __future__ import annotations

from collections.abc import Callable

from tasks.config import SamplingConfig
from tasks.generate.engine import Delta, Request
from tasks.trajectory import FinishReason


class EngineDiedError(RuntimeError):
    """What a scripted engine raises that is to fail."""


class ScriptedEngine:
    """`length_of(request_id)` is how long the policy would make that response."""

    def __init__(
        self,
        length_of: Callable[[str], int],
        prompt_tokens: int = 1,
        version: int = 0,
        dies_at_step: int | None = None,
    ) -> None:
        self.version = version
        self._steps_left = dies_at_step
        self.admitted: list[Request] = []
        self.most_in_flight = 0
        self._length_of = length_of
        self._prompt_tokens = prompt_tokens
        self._open: dict[str, tuple[int, int]] = {}  # request → tokens so far, tokens allowed

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def load(self, policy_directory: str) -> None:
        self.version = int(policy_directory)

    def admit(self, request: Request, sampling: SamplingConfig) -> None:
        kept = len(request.tokens) - self._prompt_tokens
        self._open[request.request_id] = (kept, kept + request.max_tokens)
        self.admitted.append(request)
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def step(self) -> list[Delta]:
        if self._steps_left is not None:
            if not self._steps_left:
                raise EngineDiedError
            self._steps_left -= 1
        deltas = []
        for name, (kept, limit) in list(self._open.items()):
            kept += 1
            reason = None
            if kept >= self._length_of(name):
                reason = FinishReason.STOP
            elif kept >= limit:
                reason = FinishReason.LENGTH
            self._open[name] = (kept, limit)
            if reason is not None:
                del self._open[name]
            deltas.append(Delta(name, [kept], [-0.5], reason))
        return deltas

    def abort_all(self) -> None:
        self._open.clear()

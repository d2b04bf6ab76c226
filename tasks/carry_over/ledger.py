"""The books of a run: where every group and every token went.

One iteration balances when, for groups and for tokens,

    carried in + drawn (generated) = trained + masked + filtered + failed + discarded + carried out

What was drawn and generated is counted where it happens, at the prompts and at the engine, and everything else where it
ends; so a row that is lost or doubled anywhere shows as a difference.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


class LedgerError(RuntimeError):
    """The books do not balance: something was lost or counted twice. The message gives both sides."""


@dataclass(frozen=True)
class Account:
    """Groups, or tokens. Groups are never masked."""

    carried_in: int = 0
    entered: int = 0  # drawn or generated
    trained: int = 0
    masked: int = 0  # part of a trained response, left out of the loss
    filtered: int = 0  # of groups whose members all have the same accuracy
    failed: int = 0  # of groups that cannot be scored or read
    discarded: int = 0  # of attempts that were restarted, or with `unfinished: discard`
    carried_out: int = 0

    @property
    def left(self) -> int:
        return self.trained + self.masked + self.filtered + self.failed + self.discarded + self.carried_out

    def __add__(self, other: Account) -> Account:
        """Two spans of iterations as one: what the first carried out is what the second carried in."""
        summed = {name: getattr(self, name) + getattr(other, name) for name in vars(self)}
        return Account(**summed | {"carried_in": self.carried_in, "carried_out": other.carried_out})


@dataclass(frozen=True)
class Ledger:
    groups: Account = Account()
    tokens: Account = Account()

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(self.groups + other.groups, self.tokens + other.tokens)

    def check(self) -> None:
        """Raises LedgerError if either account does not balance."""
        for name, account in (("groups", self.groups), ("tokens", self.tokens)):
            entered = account.carried_in + account.entered
            if entered != account.left:
                raise LedgerError(
                    f"the ledger of {name} does not balance: {entered} came in, {account.left} are accounted for, "
                    f"difference {entered - account.left}: {account}"
                )

    def to_json(self) -> dict[str, dict[str, int]]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, dict[str, int]]) -> Ledger:
        return cls(Account(**content["groups"]), Account(**content["tokens"]))

"""The books."""

import pytest

from tasks.carry_over.ledger import Account, Ledger, LedgerError


def test_balanced_books_pass_and_survive_json():
    ledger = Ledger(
        Account(2, 3, trained=1, filtered=1, carried_out=3), Account(10, 20, trained=25, masked=1, carried_out=4)
    )
    ledger.check()
    assert Ledger.from_json(ledger.to_json()) == ledger


@pytest.mark.parametrize("kind", ["groups", "tokens"])
@pytest.mark.parametrize(
    "field", ["carried_in", "entered", "trained", "masked", "filtered", "failed", "discarded", "carried_out"]
)
def test_one_lost_or_doubled_unit_anywhere_is_found(kind, field):
    ledger = Ledger(**{kind: Account(**{field: 1})})
    with pytest.raises(LedgerError, match=f"the ledger of {kind} does not balance: .*difference -?1"):
        ledger.check()


def test_totals_join_spans_of_iterations():
    first = Ledger(Account(0, 5, trained=2, carried_out=3), Account(0, 50, trained=20, carried_out=30))
    second = Ledger(Account(3, 4, filtered=1, carried_out=6), Account(30, 7, filtered=9, carried_out=28))
    total = first + second
    total.check()
    assert total.groups == Account(0, 9, trained=2, filtered=1, carried_out=6)

"""Leases: a block is free when nobody holds it, whoever goes first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_rt.errors import ProtocolError
from omni_rt.runtime.ledger import BlockKey, Ledger

A: BlockKey = (1, 0, 7)
B: BlockKey = (1, 4096, 8)


def test_a_block_without_holders_is_free_at_once() -> None:
    ledger = Ledger()
    assert not ledger.book(A, [])
    assert len(ledger) == 0


def test_a_block_is_free_after_its_last_lease() -> None:
    ledger = Ledger()
    ledger.book(A, ["request", "request", "client"])
    ledger.lend(A, "painter.0.1")
    assert not ledger.release(A, "request")
    assert not ledger.release(A, "client")
    assert not ledger.release(A, "painter.0.1")
    assert ledger.release(A, "request")
    assert not ledger.busy(1)


def test_a_dead_holder_gives_all_back() -> None:
    ledger = Ledger()
    ledger.book(A, ["painter.0.1"])
    ledger.book(B, ["painter.0.1", "request"])
    assert ledger.drop("painter.0.1") == [A]
    assert ledger.drop("request") == [B]
    assert len(ledger) == 0


def test_a_release_that_is_not_in_the_books_changes_nothing() -> None:
    ledger = Ledger()
    ledger.book(A, ["request"])
    assert not ledger.release(A, "stranger")
    assert not ledger.release(B, "request")
    assert ledger.holders(A) == {"request": 1}


def test_a_block_is_announced_once() -> None:
    ledger = Ledger()
    ledger.book(A, ["request"])
    with pytest.raises(ProtocolError):
        ledger.book(A, ["request"])


_KEYS = st.tuples(st.integers(1, 2), st.integers(0, 3), st.just(1))
_STEPS = st.lists(
    st.tuples(st.sampled_from(["lend", "release", "drop"]), _KEYS, st.sampled_from("abc"))
)


@given(_STEPS)
def test_the_ledger_agrees_with_a_plain_count(steps: list[tuple[str, BlockKey, str]]) -> None:
    ledger = Ledger()
    model: dict[BlockKey, Counter[str]] = {}
    for what, key, holder in steps:
        counts = model.setdefault(key, Counter())
        if what == "lend":
            ledger.lend(key, holder)
            counts[holder] += 1
        elif what == "release":
            freed = counts[holder] > 0 and counts.total() == 1
            assert ledger.release(key, holder) == freed
            counts[holder] -= counts[holder] > 0
        else:
            alone = {k for k, c in model.items() if c[holder] and c.total() == c[holder]}
            assert set(ledger.drop(holder)) == alone
            for held in model.values():
                held[holder] = 0
    assert len(ledger) == sum(counts.total() > 0 for counts in model.values())

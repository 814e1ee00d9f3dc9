"""The clause list is well formed, and every clause is put to the test by a law or a probe."""

from __future__ import annotations

import re

import pytest

from conformance.clauses import LEVELS, clause, load_clauses
from runner_api import SPEC_VERSION, Capability, UnknownNameError

CLAUSES = load_clauses()


def test_there_are_enough_of_the_strictest() -> None:
    assert sum(c.level == "MUST" for c in CLAUSES.values()) >= 40


@pytest.mark.parametrize("c", CLAUSES.values(), ids=CLAUSES.keys())
def test_a_clause_is_one_short_sentence_in_the_indicative(c) -> None:
    assert re.fullmatch(r"MR-[A-Z]+-\d{3}", c.id)
    assert c.level in LEVELS
    assert c.since <= SPEC_VERSION
    assert len(c.law) < 100
    assert c.law[0].isupper() or "_" in c.law.split()[0], "a sentence, or one that begins with a field"
    assert not c.law.endswith(".")
    assert not re.search(r"\b(should|must|shall|may)\b", c.law), "the level says how strict, the sentence says what"
    assert c.source


def test_laws_are_distinct() -> None:
    assert len({c.law for c in CLAUSES.values()}) == len(CLAUSES)


def test_missing_capabilities_are_named() -> None:
    c = clause("MR-ATTN-002")
    assert c.missing(frozenset()) == ("record_logits", "sliding_window")
    assert c.missing(frozenset({Capability.RECORD_LOGITS})) == ("sliding_window",)
    assert c.missing(frozenset(Capability)) == ()


def test_an_unknown_clause_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'MR-SLOT-00"):
        clause("MR-SLOT-01")

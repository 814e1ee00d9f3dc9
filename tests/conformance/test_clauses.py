"""The clause list is well formed, and every clause is put to the test by a law or a probe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance.clause_list import page
from conformance.clauses import LEVELS, areas, clause, load_clauses, select
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
    assert c.missing(frozenset()) == ("generate", "record_logits", "sliding_window", "step_record")
    assert c.missing(frozenset(Capability) - {Capability.SLIDING_WINDOW}) == ("sliding_window",)
    assert c.missing(frozenset(Capability)) == ()


def test_an_unknown_clause_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'MR-SLOT-00"):
        clause("MR-SLOT-01")


def test_a_selection_goes_by_whole_parts_of_ids() -> None:
    assert select(["slot"]) == tuple(c for c in CLAUSES if c.startswith("MR-SLOT-"))
    assert select(["MR-PAD-004", "pad-001"]) == ("MR-PAD-001", "MR-PAD-004")
    assert set(select(areas())) == set(CLAUSES)
    with pytest.raises(UnknownNameError, match=r"one of MR-SLOT-001, .*Did you mean 'MR-SLOT-0"):
        select(["SLOT-0"])
    with pytest.raises(UnknownNameError, match="Did you mean 'MR-SLOT'"):
        select(["SLOD"])


def test_the_page_of_clauses_is_up_to_date() -> None:
    """docs/clauses.md is what `modelrunner clauses --markdown` prints."""
    written = (Path(__file__).resolve().parents[2] / "docs" / "clauses.md").read_text(encoding="utf-8")
    assert written.splitlines() == "\n".join(page(list(CLAUSES.values()))).splitlines(), (
        "run: modelrunner clauses --markdown > docs/clauses.md"
    )

"""Every wrong function says in one sentence what it does wrong."""

from __future__ import annotations

from conformance.mutation.mutant_list import MUTANTS
from reports.mutant_results import PASSED, MutantOutcome


def test_every_mutant_has_a_sentence_of_its_own() -> None:
    sentences = [bug.says for bug in MUTANTS]
    assert [bug.name for bug in MUTANTS if not bug.says.endswith(".") or "  " in bug.says] == []
    assert sorted(one for one in set(sentences) if sentences.count(one) > 1) == []


def test_an_outcome_without_a_sentence_has_the_words_of_its_name() -> None:
    assert MutantOutcome("cap-ignored", "soft cap", "a report", PASSED).sentence == "Cap ignored"

"""Compiling: an accelerator's kernel goes through its real compiler, for each generation, without the accelerator."""

from __future__ import annotations

from collections.abc import Iterator

from conformance import records
from conformance.accelerators.targets import list_targets
from conformance.check_api.judgement import Judgement
from conformance.check_api.subject import Subject
from conformance.executor_tasks import native_compilation

_VERDICTS = {
    "compiled": records.PASS,
    "failed": records.FAIL,
    "refused": records.UNSUPPORTED,
    "no compiler": records.UNJUDGED,
}


def check_compiles(subject: Subject) -> Iterator[Judgement]:
    """The call, with residuals and with gradients too, compiles for each generation of its accelerator.

    Where a compiler takes seconds a program, only the plainest and the fullest of these programs are compiled.
    """
    implementation = subject.implementation
    if implementation.accelerator.native is None:
        yield _build_unjudged(
            "all", "the implementation declares no `native` call, which its accelerator's compiler takes"
        )
        return
    targets = list_targets(implementation.accelerator.platform)
    if missing := {reason for target in targets if (reason := target.toolchain.missing)}:
        yield _build_unjudged("all", "; ".join(sorted(missing)))
        return
    found = subject.executor.run(native_compilation.compile_programs, subject.case, gradients=subject.has_gradients)
    for one in found:
        yield Judgement(
            observable=f"{one['target']}.{one['program']}",
            verdict=_VERDICTS[one["outcome"]],
            reason=one["reason"],
            figures=one["figures"],
        )


def _build_unjudged(observable: str, reason: str) -> Judgement:
    return Judgement(observable=observable, verdict=records.UNJUDGED, reason=reason)

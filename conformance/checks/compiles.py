"""Check `compiles`: the compiler of the kernel's accelerator, TPU or GPU, accepts the kernel.

No accelerator is needed, since nothing runs. `conformance.accelerators` has the compilers and their targets.
"""

from __future__ import annotations

from collections.abc import Iterator

from conformance.accelerators.targets import list_targets
from conformance.check_api.judgement import Judgement
from conformance.check_api.subject import Subject
from conformance.executor_tasks import native_compilation
from reports import records

_VERDICTS = {
    "compiled": records.PASS,
    "failed": records.FAIL,
    "refused": records.UNSUPPORTED,
    "no compiler": records.UNJUDGED,
}


def check_compiles(subject: Subject) -> Iterator[Judgement]:
    """Check that the kernel compiles for each generation of its accelerator, with residuals and gradients.

    For a slow compiler, which takes seconds for a program, only the plainest and the largest program are compiled.
    """
    implementation = subject.implementation
    if implementation.accelerator.native is None:
        yield _build_unjudged(
            "all", "the implementation declares no `native` call, the one that its accelerator's compiler can compile"
        )
        return
    targets = list_targets(implementation.accelerator.platform)
    if missing := {reason for target in targets if (reason := target.toolchain.missing)}:
        yield _build_unjudged("all", "; ".join(sorted(missing)))
        return
    programs = subject.executor.run(native_compilation.compile_programs, subject.case, gradients=subject.has_gradients)
    for program in programs:
        yield Judgement(
            observable=f"{program['target']}.{program['program']}",
            verdict=_VERDICTS[program["outcome"]],
            reason=program["reason"],
            figures=program["figures"],
        )


def _build_unjudged(observable: str, reason: str) -> Judgement:
    return Judgement(observable=observable, verdict=records.UNJUDGED, reason=reason)

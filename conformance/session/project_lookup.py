"""Find the things that options of a run name: the project's settings, implementations and cases.

Errors become `CannotJudge`, whose message the user sees.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from cases import mask_spec
from cases.case import Case, CaseIdError
from cases.case_fields import DISTRIBUTIONS, DTYPES, PHASES
from cases.case_id import matches_query, parse_case_id
from cases.name_suggestions import suggest_name
from cases.named_problems import index_problems
from cases.operand_registry import OPTIONAL
from conformance.execution import implementation_registry
from conformance.judging import settings
from conformance.judging.settings import Settings
from conformance.sandbox.kernel_options import KernelOptions
from conformance.sandbox.policy import build_policy
from conformance.session.failures import CannotJudge
from conformance.session.run_spec import RunSpec
from impls.contract.implementation import Implementation

SANDBOXED = KernelOptions()
"""The kernel options of a command that has none of its own: kernels of the user run in a sandbox."""
_PARTS_OF_IDS = (
    *PHASES,
    *DTYPES,
    *DISTRIBUTIONS,
    *(kind.name for kind in mask_spec.KINDS),
    *(level for operand in OPTIONAL for level in (*operand.levels, *operand.stored_levels) if isinstance(level, str)),
)
"""Words that components of a case id may be."""
_MEMORY_FACTOR = 20
"""The memory that judging a case takes, as a multiple of the size of its operands in float64.

Measured on a problem that decodes over pages, with all checks, with 4 and with 8 of its 64 sequences.
"""


def load_project_settings(folder: Path | None = None) -> Settings:
    """Load the settings of the project in a folder, or in the current one. Raises `CannotJudge` if they are wrong."""
    try:
        return settings.load_settings(folder or Path.cwd())
    except settings.SettingsError as error:
        raise CannotJudge(str(error)) from error


def build_kernel_options(
    spec: RunSpec, *, hidden_files: Sequence[str] | None = None, handshakes: Sequence[tuple[str, str]] = ()
) -> KernelOptions:
    """Build the options that say how kernels are found and where they run.

    Args:
      hidden_files: files that kernels must not read; those that the spec names if left out.
      handshakes: pairs of a kernel's name and its handshake with the process that started this one.

    Raises:
      CannotJudge: for a problem or a sandbox option that cannot be used.
    """
    problem, problems = spec.problem, index_problems()
    if problem is not None and problem not in problems:
        raise CannotJudge(
            f"unknown problem {problem!r}: known are {', '.join(problems)} (`list problems` describes them)"
            f"{suggest_name(problem, problems)}"
        )
    hidden = spec.named_files if hidden_files is None else hidden_files
    try:
        policy = build_policy(list(spec.sandbox_read), list(spec.sandbox_env), list(hidden))
    except ValueError as error:
        raise CannotJudge(f"{spec.option_prefix}{error}") from error
    return KernelOptions(
        products=spec.products,
        in_process=spec.in_process,
        timeout=spec.timeout,
        memory=spec.memory,
        problem=problem,
        sandbox=policy,
        require_sandbox=spec.require_sandbox,
        handshakes=tuple(handshakes),
    )


def find_implementations(names: Sequence[str], kernels: KernelOptions = SANDBOXED) -> list[Implementation]:
    """Find implementations by their names. A kernel of the user is sandboxed unless `kernels` says otherwise.

    Raises:
      CannotJudge: if a name is unknown or cannot be loaded, or if `--products` is given and declares nothing.
    """
    try:
        found = [kernels.find(name) for name in names]
    except implementation_registry.ImplementationNotFound as error:
        raise CannotJudge(str(error)) from error
    if kernels.products and all(one.arithmetic.products != kernels.products for one in found):
        raise CannotJudge(
            f"--products={kernels.products} declares the products of a plain function, and {found[0].name} has a "
            f'declaration of its own, products="{found[0].arithmetic.products}": leave out --products'
        )
    return found


def find_implementation(name: str, kernels: KernelOptions = SANDBOXED) -> Implementation:
    """Find an implementation by its name, as `find_implementations` does. Raises `CannotJudge`."""
    return find_implementations([name], kernels)[0]


def parse_case(text: str) -> Case:
    """Parse the id of a case. Raises `CannotJudge` for an invalid id, and for a case too large for this machine."""
    try:
        found = parse_case_id(text)
    except CaseIdError as error:
        wrong = re.search(r"'([^']+)'", str(error))
        closest = suggest_name(wrong[1], _PARTS_OF_IDS) if wrong is not None and wrong[1] != text else ""
        raise CannotJudge(f"{error}{closest}") from error
    available = _measure_memory()
    if (needed := _count_operand_bytes(found)) > available:
        raise CannotJudge(
            f"{text} needs more than {needed / 1e9:,.0f} GB for its operands alone, and this machine has "
            f"{available / 1e9:,.0f} GB"
        )
    return found


def select_problem_cases(problem: str, *, full_size: bool, case: str | None, query: str | None) -> list[Case]:
    """Select the cases of a named problem that match a query, or the single case `case`.

    With `full_size` they have the problem's original sizes, otherwise smaller ones.

    Raises:
      CannotJudge: if the problem has no cases of full size, or they are too large for this machine.
    """
    if case is not None:
        return [parse_case(case)]
    found = index_problems()[problem].cases(full_size=full_size)
    if not found:
        raise CannotJudge(f"--full-size: {problem} has no cases of full size, since its operands would not be exact")
    chosen = [parse_case(one.id) for one in found if query is None or matches_query(query, one.id)]
    needed, available = _MEMORY_FACTOR * max(map(_count_operand_bytes, chosen), default=0), _measure_memory()
    if full_size and needed > available:
        raise CannotJudge(
            f"--full-size: {problem} needs about {needed / 1e9:,.0f} GB, and this machine has "
            f"{available / 1e9:,.0f} GB: a --case with fewer sequences or heads of the same lengths is of the problem "
            f"too"
        )
    return chosen


def _measure_memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _count_operand_bytes(case: Case) -> int:
    """Return the number of bytes of q, k and v in float64, the oracle's dtype."""
    keys = case.kv_length * case.num_kv_heads * (case.head_dim + case.v_head_dim)
    return 8 * case.batch * (case.q_length * case.num_q_heads * case.head_dim + keys)

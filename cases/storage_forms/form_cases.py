"""Describe the cases on which kernels of one storage form are judged.

Each form has a module `NAME_cases` with one `FormCases`, named `CASES`, beside its module `NAME_form`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cases.case import Case
from cases.covering_model import Model
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.storage_layout import Storage

if TYPE_CHECKING:
    from hypothesis import strategies as st

Caches = tuple[str | None, ...]
"""Formats of quantised caches (`Case.kv_cache`), with None for the dtype of the operands."""
SAVED = ("residuals",)
"""The checks of a signature case that asks for residuals."""
SAVED_WITH_GRADIENT = ("residuals", "gradients_lse")
"""The checks of a signature case that asks for residuals and the gradient of `logsumexp`."""
BEHIND_MASK = ("residuals", "poison")
"""The checks of a signature case that asks what lies behind the mask."""
TraceStep = tuple[tuple[int, int, int], ...]
"""A call of a server: `(request, first query, one past the last)` of each sequence that it has."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FormCases:
    """The cases of one storage form.

    Attributes:
      models: the axes of features and of sizes that the covering arrays vary along.
      find_models: other models for a kernel that writes pages, or that offers these features; none if there are no
        others.
      plain: a plain case, which every kernel of the form supports.
      draw_cases: the Hypothesis strategy for cases of these phases and caches.
      caches: the formats of caches that a kernel of the form may take.
      further_sequences: sequences that no case of the grids has, by name: the fields of a case that differ.
      other_masks: masks that any case of the form may have; none if those of `list_other_masks` are meant.
      has_sized_sequences: whether a case of another length has as many slots as tokens.
      trace_fields: fields of the cases whose sequences a server's trace has; the first supported one is taken.
      trace_sizes: sizes of pages or rings of these cases.
      trace_windows: the left sides of their windows.
      iter_trace_layouts: yields the layout of each step of a trace, for B, T and S of its steps; none without traces.
      build_compiled: builds the cases that accelerators' compilers are asked for.
      build_interpreted: builds those for accelerators' interpreters: of each line the first supported one is taken.
      signature_cases: ids of `cases.signature_cases` without a seed, each with checks beside `forward` and `gradients`.
    """

    models: tuple[Model, Model]
    find_models: Callable[[bool, frozenset[str]], tuple[Model, Model]] | None = None
    plain: Case
    draw_cases: Callable[[tuple[str, ...], Caches], st.SearchStrategy[Case]]
    caches: Caches = (None,)
    further_sequences: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    other_masks: tuple[str, ...] | None = None
    has_sized_sequences: bool = False
    trace_fields: tuple[Mapping[str, Any], ...] = ()
    trace_sizes: tuple[int, ...] = ()
    trace_windows: tuple[str, ...] = ()
    iter_trace_layouts: Callable[[Case, Sequence[TraceStep], tuple[int, int, int]], Iterator[Storage]] | None = None
    build_compiled: Callable[[], tuple[Case, ...]] = tuple
    build_interpreted: Callable[[], tuple[tuple[Case, ...], ...]] = tuple
    signature_cases: tuple[tuple[str, tuple[str, ...]], ...] = ()


def load_form_cases(form: str) -> FormCases:
    """Load the cases of the storage form of this name."""
    found: FormCases = importlib.import_module(f"cases.storage_forms.{form}_cases").CASES
    return found


def load_all_form_cases() -> dict[str, FormCases]:
    """Load the cases of all storage forms, by name of the form."""
    return {name: load_form_cases(name) for name in FORMS}


def build_case(
    lengths: int | tuple[int, int], heads: tuple[int, int], depths: tuple[int, int], mask: str, **changes: Any
) -> Case:
    """Build a case in bf16 of these lengths `(T, S)`, heads `(N, K)` and depths `(H, V)`, with other fields changed."""
    q_length, kv_length = lengths if isinstance(lengths, tuple) else (lengths, lengths)
    sizes = {"q_length": q_length, "kv_length": kv_length}
    named = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": depths[0], "v_head_dim": depths[1]}
    return Case(**{"dtype": "bf16", "mask": mask, **sizes, **named, **changes})

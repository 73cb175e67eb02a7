"""Define `FormCases`, the description of all cases on which kernels of one storage form are judged.

Each form has a module `NAME_cases` that defines one `FormCases` as `CASES`. `load_form_cases` imports it.
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
"""Formats of quantised caches (`cases.quantization.split_level`); None is a cache in the dtype of the operands."""
SAVED = ("residuals",)
"""The checks that judge an error profile case's residuals."""
SAVED_WITH_GRADIENT = ("residuals", "gradients_lse")
"""The checks that judge an error profile case's residuals and its gradients for a cotangent of `logsumexp`."""
BEHIND_MASK = ("residuals", "poison")
"""The checks that judge an error profile case's residuals, and whether memory behind the mask affects results."""
TraceStep = tuple[tuple[int, int, int], ...]
"""One call of a server's trace: `(request, first query, one past its last query)` for each sequence of the call."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FormCases:
    """The cases of one storage form.

    Attributes:
      models: two models of the covering arrays: one varies features, the other varies sizes.
      find_models: returns the two models for a kernel, from whether it writes pages and from the opt-in features that
        it offers; None if every kernel of the form uses `models`.
      find_further_models: returns further models for a kernel, from the same two; None if there are none.
      plain: a plain case, which every kernel of the form supports.
      draw_cases: returns the Hypothesis strategy for cases of the given phases and formats of caches.
      caches: the formats of caches that a kernel of the form may take.
      further_sequences: by name, sequences that no case of the grid has, as the fields of `Case` to change.
      other_masks: mask specs that fit any case of the form; None if they depend on the case (`list_other_masks`).
      has_sized_sequences: whether `stored_cases.with_length` gives a case as many slots as its sequence has tokens.
      trace_fields: fields of `Case` for the cases of server traces. The first entry that a kernel supports is used.
      trace_sizes: the sizes of pages or rings to try in the cases of server traces, in order.
      trace_windows: the left sides of the windows in the cases of server traces, as a case id writes them.
      iter_trace_layouts: yields the layout of each step of a trace; its arguments are the case, the steps, and B, T and
        S of a step. None if the form has no traces.
      build_compiled: builds the cases that are compiled for accelerators.
      build_interpreted: builds the cases that run in the accelerators' interpreters, in groups. From each group, the
        first case that a kernel supports is used.
      error_profile_cases: pairs of a case id without its seed, and the checks beside `forward` and `gradients` that
        judge the case (`cases.error_profile_cases`).
    """

    models: tuple[Model, Model]
    find_models: Callable[[bool, frozenset[str]], tuple[Model, Model]] | None = None
    find_further_models: Callable[[bool, frozenset[str]], tuple[Model, ...]] | None = None
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
    error_profile_cases: tuple[tuple[str, tuple[str, ...]], ...] = ()


def load_form_cases(form: str) -> FormCases:
    """Load the `FormCases` of the storage form with this name."""
    found: FormCases = importlib.import_module(f"cases.storage_forms.{form}_cases").CASES
    return found


def load_all_form_cases() -> dict[str, FormCases]:
    """Load the `FormCases` of all storage forms, by the name of the form."""
    return {name: load_form_cases(name) for name in FORMS}


def build_case(
    lengths: int | tuple[int, int], heads: tuple[int, int], depths: tuple[int, int], mask: str, **changes: Any
) -> Case:
    """Build a bf16 case from lengths `(T, S)`, heads `(N, K)`, depths `(H, V)` and a mask spec.

    A single number as `lengths` is both T and S. `changes` sets other fields of `Case`, or another dtype.
    """
    q_length, kv_length = lengths if isinstance(lengths, tuple) else (lengths, lengths)
    sizes = {"q_length": q_length, "kv_length": kv_length}
    named = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": depths[0], "v_head_dim": depths[1]}
    return Case(**{"dtype": "bf16", "mask": mask, **sizes, **named, **changes})

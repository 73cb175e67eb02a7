"""The registry of storage forms; it parses the storage in a case id and recognises the form of a function."""

from __future__ import annotations

from collections.abc import Sequence

from cases.storage_forms.latent_form import LATENT
from cases.storage_forms.latent_pages_form import LATENT_PAGES
from cases.storage_forms.packed_form import PACKED
from cases.storage_forms.paged_form import PAGED
from cases.storage_forms.ring_form import RING
from cases.storage_forms.storage_form import MAX_SIZE, StorageForm, StorageSpec

FORMS: dict[str, StorageForm] = {form.name: form for form in (PACKED, PAGED, LATENT, LATENT_PAGES, RING)}
"""The storage forms by name, in the order in which lists and report columns show them."""
FEATURES: dict[str, str] = {form.name: form.description for form in FORMS.values()}
"""The description of each form by its name, which is also the feature that cases of the form need."""
SYNTAX = "|".join(form.syntax for form in FORMS.values()) + "[-qL-...]"
"""The syntax of a storage in a case id, for messages."""


def read_storage(part: str) -> StorageSpec | None:
    """Parse a part of a case id as a storage, without checking its sizes; return None if it is no storage."""
    for form in FORMS.values():
        if found := form.pattern.fullmatch(part):
            lengths = tuple(int(n) for n in found[3].split("-")) if found[3] else ()
            return StorageSpec(
                form.name, int(found[2]) if found[2] else None, found[1] != form.prefixes[False], lengths
            )
    return None


def parse_storage(text: str, batch: int, q_length: int) -> StorageSpec:
    """Parse an id's storage, of at most `q_length` queries a sequence. Raises `ValueError` if it does not fit."""
    spec = read_storage(text)
    if spec is None:
        raise ValueError(f"storage {text!r} is not of the form {SYNTAX}")
    form, lengths = FORMS[spec.form], spec.q_lengths
    if lengths and (len(lengths) != batch or max(lengths) > q_length or not any(lengths)):
        raise ValueError(
            f"storage {text!r} needs a number of queries for each of {batch} sequences: at most {q_length}, not all 0"
        )
    if lengths and min(lengths) == q_length:
        raise ValueError(f"storage {text!r} has T={q_length} queries for every sequence: leave them out")
    if spec.size is not None and spec.size > MAX_SIZE:
        raise ValueError(f"storage {text!r} has {form.unit} of more than {MAX_SIZE} tokens")
    if lengths and not form.has_q_lengths:
        raise ValueError(f"storage {text!r} has all T={q_length} queries in every row: only packed ones have lengths")
    return spec


def find_form(parameters: Sequence[str]) -> StorageForm | None:
    """Return the storage form whose operands a user's function takes; None if it takes dense operands.

    A function that takes latents is recognised by the name of its second parameter. Any other function is recognised by
    its keyword parameters (`StorageForm.marks`). If they match several forms, the form with the fewest marks is taken,
    since its marks are the most specific.
    """
    for form in FORMS.values():
        if not form.marks and parameters[1:2] == [form.operands[1]]:
            return form
    marked = (form for form in FORMS.values() if set(form.marks) & set(parameters[3:]))
    return min(marked, key=lambda form: len(form.marks), default=None)

"""Read the kernels of authors who had seen neither the checks nor the planted bugs, and what is known of each.

They were written from the contract alone. These are drawn at random from a larger set, which `docs/sensitivity.md`
describes: 12 of the wrong kernels that `smoke` saw, and 5 of the correct ones. `kernels.json` has the fault of each.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnseenKernel:
    """A kernel of `wrong` or `correct`.

    Attributes:
      name: the name of its file, without the suffix.
      declarations: what its author declared.
      fault: what is wrong, in the words of its author; of a kernel in `correct`, its style.
      feature: the calls in which the fault shows.
      words: phrases that the first finding at `smoke` has, if it names the cause.
    """

    name: str
    declarations: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fault: str
    feature: str = ""
    words: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Return the folder that has the kernel: `correct` or `wrong`, as its author meant it."""
        return "correct" if (FOLDER / "correct" / f"{self.name}.py").exists() else "wrong"

    @property
    def source(self) -> str:
        """Return the source of the kernel, with its author's declarations."""
        text = (FOLDER / self.folder / f"{self.name}.py").read_text(encoding="utf-8")
        if not self.declarations:
            return text
        given = ", ".join(f"{name}={value!r}" for name, value in self.declarations.items())
        return f"{text}\n\nfrom conformance import declare\n\nattention = declare({given})(attention)\n"


def load_kernels() -> dict[str, UnseenKernel]:
    """Load all kernels by name."""
    read = json.loads((FOLDER / "kernels.json").read_text(encoding="utf-8"))
    return {row["name"]: UnseenKernel(**{**row, "words": tuple(row.get("words", ()))}) for row in read}

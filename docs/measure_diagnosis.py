"""Diagnose each planted bug by the others, and store the counts by family. Takes a minute.

python docs/measure_diagnosis.py
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from conformance.sensitivity import error_profiles
from tests.bank import confusions

FILE = Path(__file__).parent / "measurements" / "data" / "diagnosis.json"


def main() -> None:
    """Write the counts."""
    bank = list(error_profiles.load_profiles())
    lines = ",\n".join("  " + json.dumps(dataclasses.asdict(row)) for row in confusions.measure_confusions(bank))
    FILE.write_text(f'{{"bugs": {len(bank)}, "families": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()

"""`python -m conformance`, and the console script."""

from __future__ import annotations

import os

from conformance import interrupts


def main() -> None:
    """Record signals first of all, then load the command line and carry out the command."""
    with interrupts.record_signals():
        try:
            from conformance.cli import run_main  # imported late: a signal while it loads must not be lost
        except Exception as error:  # a library that is missing, or a file that cannot be read
            line = f"error: the command line does not load: {type(error).__name__}: {error}".replace("\n", " ")
            os.write(2, f"{line}\n".encode(errors="backslashreplace"))
            os._exit(interrupts.resolve_exit_code(2))
        run_main()


if __name__ == "__main__":
    main()

"""Start the command line, for `python -m conformance` and for the console script.

Stop signals are recorded from the first line on, since loading the command line takes a while.
"""

from __future__ import annotations

import os
import sys

from conformance import exhausted_memory, interrupts


def main() -> None:
    """Start recording stop signals, then run the command: in a server if there is one, otherwise in this process."""
    with interrupts.record_signals():
        try:
            from conformance.served_command import run_in_server

            if (code := run_in_server(sys.argv)) is not None:
                sys.exit(interrupts.resolve_exit_code(code))
            from conformance.cli import run_main  # slow, so signals during the import are recorded too
        except Exception as error:  # for example a missing library, or an unreadable file
            reason = exhausted_memory.describe_exhausted_memory(error) or f"{type(error).__name__}: {error}"
            line = f"error: the command line does not load: {reason}".replace("\n", " ")
            os.write(2, f"{line}\n".encode(errors="backslashreplace"))
            os._exit(interrupts.resolve_exit_code(2))
        run_main()


if __name__ == "__main__":
    main()

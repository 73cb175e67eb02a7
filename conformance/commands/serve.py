"""Implement `serve`: keep a process with JAX loaded, so that `run` and `explore` start at once."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading

from rich.console import Console

from conformance import interrupts
from conformance.fork_server import command_server, forked_process
from conformance.fork_server.forked_process import ForkedProcess
from conformance.session.failures import CannotJudge

_PRELOADED_MODULES = ("conformance.cli", "conformance.commands.run", "conformance.commands.explore")


def serve(arguments: argparse.Namespace) -> int:
    """Serve commands of this user until a stop signal arrives, and return 0.

    Raises:
      CannotJudge: if this system cannot serve commands, or a server runs already.
    """
    del arguments
    if not command_server.is_supported():
        raise CannotJudge("serve needs Linux: other systems have no abstract sockets")
    console = Console(stderr=True)
    folder = tempfile.mkdtemp(prefix="conformance-serve-")
    try:
        forked_process.start_server(_PRELOADED_MODULES)
        loaded = ForkedProcess(_do_nothing)
        loaded.wait()
        loaded.release()
        try:
            command_server.share_with_commands(folder)
        except OSError as error:
            raise CannotJudge(f"such a server runs already ({error.strerror})") from error
        console.print("serving: `run` and `explore` start at once while this runs. Ctrl-C ends it.", style="dim")
        threading.Event().wait()
    except KeyboardInterrupt:
        console.print("ended", style="dim")
    finally:
        with interrupts.delay_signals():
            forked_process.end_server()
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _do_nothing() -> None:
    """Return at once: a process that ran this shows that the server has loaded its modules."""

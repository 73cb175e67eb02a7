"""Implement `serve`: keep a process with JAX loaded, so that `run` and `explore` start at once."""

from __future__ import annotations

import argparse

from rich.console import Console

from conformance.fork_server import command_server, forked_process
from conformance.fork_server.forked_process import ForkedProcess
from conformance.session.failures import CannotJudge
from conformance.temporary_folders import use_temporary_folder

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
    try:
        with use_temporary_folder("serve") as folder:
            forked_process.start_server(_PRELOADED_MODULES)
            loaded = ForkedProcess(_do_nothing)
            loaded.wait()
            loaded.release()
            try:
                listening = command_server.listen()
            except OSError as error:
                raise CannotJudge(f"such a server runs already ({error.strerror})") from error
            console.print("serving: `run` and `explore` start at once while this runs. Ctrl-C ends it.", style="dim")
            with listening:
                command_server.share_with_commands(listening, folder)
    except KeyboardInterrupt:
        console.print("ended", style="dim")
    finally:
        forked_process.leave_server()
    return 0


def _do_nothing() -> None:
    """Return at once: a process that ran this shows that the server has loaded its modules."""

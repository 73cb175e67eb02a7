"""Share the fork server with child processes that it did not fork: the workers of pytest-xdist.

The main process sends the server's socket to its children through an abstract Unix socket. It answers only its own
children. The fork server, not the main process, is the parent of a kernel's process. So no kernel can reach the fork
server this way.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import socket
import struct
import sys
import threading
from pathlib import Path

from conformance.fork_server import forked_process

_IS_LINUX = sys.platform.startswith("linux")
_PEER_CREDENTIALS = struct.Struct("3i")  # process id, user id and group id of the peer process
_ANSWER_TIMEOUT = 5.0  # seconds; normally the answer comes at once


def share_server() -> str:
    """Offer this process's fork server to its children; return the address for `join_server`, empty if impossible."""
    if not (forked_process.has_server() and _IS_LINUX):
        return ""
    address = f"conformance-fork-server-{secrets.token_hex(16)}"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0{address}")  # abstract: it needs no file
    listening.listen()
    threading.Thread(target=_serve_clients, args=(listening,), daemon=True).start()
    return address


def _serve_clients(listening: socket.socket) -> None:
    while True:
        with contextlib.suppress(OSError, ValueError), listening.accept()[0] as client:
            if _find_parent(client) == os.getpid():
                requests, import_environment = forked_process.export_connection()
                socket.send_fds(client, [pickle.dumps(dict(import_environment))], [requests])


def join_server(address: str) -> None:
    """Use the fork server that is shared at an address. If that fails, this process later starts its own."""
    with contextlib.suppress(OSError, ValueError, EOFError, pickle.UnpicklingError):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(_ANSWER_TIMEOUT)
            client.connect(f"\0{address}")
            message, fds, _, _ = socket.recv_fds(client, 2**16, 1)
        (requests,) = fds
        forked_process.adopt_connection(requests, pickle.loads(message))


def _find_parent(client: socket.socket) -> int:
    """Return the id of the parent of the process at the other end of the socket."""
    peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid, _, _ = _PEER_CREDENTIALS.unpack(peer)
    # In `stat`, the name of the program is in parentheses, and may itself contain parentheses.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

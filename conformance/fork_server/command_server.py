"""Share a fork server with commands that are started later, so that they need not load JAX (`serve`).

The server listens on an abstract Unix socket. It gives each client of the same user the fork server's socket and the
name of a folder; the client then requests a process for its command from the fork server. If the server ends, the fork
server goes on until the last of these processes has ended.

The socket's name has two digests. The first is of the installation, of the environment variables that imports read, and
of the places for temporary files; commands with others do not see the server. The second is of what the server has
loaded: the sources of this project, and the folder of installed packages. After a change of these, the server is stale.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pickle
import socket
import struct
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NoReturn

from conformance import packages
from conformance.fork_server import forked_process
from conformance.temporary_folders import TemporaryFolder

_PREFIX = "conformance-serve"
_SOCKETS = Path("/proc/net/unix")
_PEER_CREDENTIALS = struct.Struct("3i")  # process id, user id and group id of the peer process
_ANSWER_TIMEOUT = 5.0  # seconds; normally the answer comes at once


@dataclasses.dataclass(frozen=True)
class FoundServer:
    """The result of looking for a server of this user."""

    folder: str  # the folder in which the server that was joined keeps data; empty if none was joined
    has_stale: bool  # whether there is a server that has loaded older sources or packages
    # A descriptor that becomes readable when the joined server ends; -1 if none was joined. Nothing is read.
    end: int = -1
    lock: int = -1  # a descriptor that keeps the folder locked; -1 if none was joined


def is_supported() -> bool:
    """Tell whether this system can share a fork server: only Linux has abstract sockets."""
    return sys.platform.startswith("linux")


def listen() -> socket.socket:
    """Return a socket on which commands find this process. Raises `OSError` if an equal server runs already."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0{_compute_address()}")
    listening.listen()
    return listening


def share_with_commands(listening: socket.socket, folder: TemporaryFolder) -> NoReturn:
    """Let commands use this fork server by the socket `listening`, and keep data in `folder`, until an exception."""
    end, _ = os.pipe()  # only this process has the other end, so the system closes it when this process ends
    while True:
        with contextlib.suppress(OSError, ValueError), listening.accept()[0] as client:
            if _find_user(client) == os.getuid():
                requests, import_environment = forked_process.export_connection()
                message = pickle.dumps((dict(import_environment), folder.path))
                socket.send_fds(client, [message], [requests, end, folder.lock])


def join_server() -> FoundServer:
    """Use the fork server of a server that this user runs with the same sources and settings, if there is one."""
    own = f"@{_name_installation()}-"
    try:
        names = [line.rpartition(" ")[2] for line in _SOCKETS.read_text().splitlines() if own in line]
    except OSError:
        names = []
    if not names:
        return FoundServer("", has_stale=False)
    address = _compute_address()
    if f"@{address}" not in names:
        return FoundServer("", has_stale=True)
    with contextlib.suppress(OSError, ValueError, EOFError, pickle.UnpicklingError):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(_ANSWER_TIMEOUT)
            client.connect(f"\0{address}")
            if _find_user(client) != os.getuid():
                return FoundServer("", has_stale=False)
            message, fds, _, _ = socket.recv_fds(client, 2**16, 3)
        requests, end, lock = fds
        import_environment, folder = pickle.loads(message)
        forked_process.adopt_connection(requests, import_environment)
        return FoundServer(folder, has_stale=False, end=end, lock=lock)
    return FoundServer("", has_stale=False)


def _compute_address() -> str:
    """Compute the name of the socket, from the user, the installation and what a server loads."""
    loaded = hashlib.blake2b(sys.version.encode(), digest_size=16)
    for kind in ("purelib", "platlib"):
        loaded.update(repr(os.stat(sysconfig.get_path(kind)).st_mtime_ns).encode())
    for package in packages.NAMES:
        for source in sorted((packages.HOME / package).rglob("*.py")):
            about = source.stat()
            loaded.update(repr((str(source), about.st_mtime_ns, about.st_size)).encode())
    return f"{_name_installation()}-{loaded.hexdigest()}"


def _name_installation() -> str:
    """Return the first part of the socket's name: the user, the installation, and what a command must share."""
    environ = sorted(forked_process.read_import_environment().items())
    places = (tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR"))
    found = hashlib.blake2b(repr((sys.executable, str(packages.HOME), environ, places)).encode(), digest_size=8)
    return f"{_PREFIX}-{os.getuid()}-{found.hexdigest()}"


def _find_user(peer: socket.socket) -> int:
    """Return the user id of the process at the other end of the socket."""
    return int(
        _PEER_CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size))[1]
    )

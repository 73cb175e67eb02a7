"""Test that a sandboxed kernel can send nothing, by any way that works in an unconfined process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.sandbox import confinement
from tests.sandbox import network_attempts

WAYS = tuple(way.__name__ for way in network_attempts.WAYS)
# These leave no message at a listener of the test: they count as open if the call itself succeeds.
_BY_CALL = ("netlink", "io_uring")


class Listeners:
    """Sockets of every kind, and the messages that arrived at them."""

    def __init__(self) -> None:
        self.addresses: dict[str, object] = {}
        self.received: list[bytes] = []

    def listen(self, one: socket.socket) -> None:
        """Take what arrives at a socket, in a thread of its own, until the socket is closed."""
        threading.Thread(target=self._take, args=(one,), daemon=True).start()

    def _take(self, one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if one.type != socket.SOCK_STREAM:
                while True:
                    self.received.append(one.recv(2**12))
            while True:
                taken, _ = one.accept()
                with taken, taken.makefile("rb") as sent:
                    self.received.append(sent.read())

    def has(self, way: str) -> bool:
        """Tell whether the word of a way has arrived."""
        word = b"\x03dns\x04test" if way == "dns" else way.encode()
        return any(message == word or (way == "dns" and word in message) for message in self.received)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The ways by which something got out of a process, and how the others failed."""

    sentence: str
    sent: frozenset[str]
    raised: dict[str, str]


@contextlib.contextmanager
def listeners(folder: Path) -> Iterator[Listeners]:
    """Listen everywhere."""
    found = Listeners()
    abstract = f"conformance-test-{secrets.token_hex(8)}"
    kinds: dict[str, tuple[tuple[int, int], Any]] = {
        "tcp": ((socket.AF_INET, socket.SOCK_STREAM), ("127.0.0.1", 0)),
        "udp": ((socket.AF_INET, socket.SOCK_DGRAM), ("127.0.0.1", 0)),
        "unix_stream": ((socket.AF_UNIX, socket.SOCK_STREAM), str(folder / "stream")),
        "unix_datagram": ((socket.AF_UNIX, socket.SOCK_DGRAM), str(folder / "datagram")),
        "abstract": ((socket.AF_UNIX, socket.SOCK_STREAM), f"\0{abstract}"),
        "vsock": ((network_attempts.AF_VSOCK, socket.SOCK_STREAM), (0xFFFFFFFF, 0xFFFFFFFF)),
    }
    with contextlib.ExitStack() as closing:
        for name, (kind, address) in kinds.items():
            try:
                one = closing.enter_context(socket.socket(*kind))
                one.bind(address)
                if one.type == socket.SOCK_STREAM:
                    one.listen()
            except OSError:  # the system has no vsock
                found.addresses[name] = 0
                continue
            found.listen(one)
            place: dict[str, object] = {"tcp": one.getsockname(), "udp": one.getsockname(), "abstract": abstract}
            found.addresses[name] = one.getsockname()[1] if name == "vsock" else place.get(name, address)
        yield found


def try_every_way(folder: Path, confined: str) -> Outcome:
    """Run `network_attempts` in a process, and find what got out of it."""
    folder.mkdir()
    (folder / "scratch").mkdir()
    with listeners(folder) as found:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            given = json.dumps(found.addresses | {"inherited": theirs.fileno()})
            command = [sys.executable, "-m", "tests.sandbox.network_attempts", given, str(folder / "scratch"), confined]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[theirs.fileno()])
            while process.poll() is None:
                if (port := folder / "scratch" / "port").exists() and port.read_text():
                    with (
                        contextlib.suppress(OSError),
                        socket.create_connection(("127.0.0.1", int(port.read_text()))) as to,
                    ):
                        found.received.append(to.recv(2**12))
                    port.unlink()
                time.sleep(0.02)
            assert process.stdout is not None
            said = json.loads(process.stdout.read())
            process.stdout.close()
            theirs.close()
            found.received.append(ours.recv(2**12))
            deadline = time.monotonic() + 5.0
            expected = [way for way in WAYS if way not in said["raised"] and way not in _BY_CALL]
            while not all(map(found.has, expected)) and time.monotonic() < deadline:
                time.sleep(0.02)
        sent = {way for way in WAYS if found.has(way) or (way in _BY_CALL and way not in said["raised"])}
    return Outcome(said["sentence"], frozenset(sent), said["raised"])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Outcome]:
    """Return what got out of an unconfined process, and of a confined one."""
    folder = tmp_path_factory.mktemp("network")
    return try_every_way(folder / "free", "free"), try_every_way(folder / "confined", "confined")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox is Linux's")
@pytest.mark.parametrize("way", WAYS)
def test_nothing_gets_out(way: str, outcomes: tuple[Outcome, Outcome]) -> None:
    free, confined = outcomes
    if not confinement.is_confined(confined.sentence):
        pytest.skip(confined.sentence)
    assert way not in confined.sent
    assert way in confined.raised
    if way not in free.sent:
        pytest.skip(f"this system has no such way out for anybody: {free.raised.get(way, 'it did not arrive')}")

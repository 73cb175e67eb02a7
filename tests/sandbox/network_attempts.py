"""Send a byte out of a process in many ways: `python network_attempts.py ADDRESSES SCRATCH CONFINED`.

ADDRESSES is JSON: for each way, where something listens. Each way sends its own name. The program prints, as JSON,
which ways raised, and what.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conformance.sandbox import confinement

MSG_FASTOPEN, IPPROTO_MPTCP, VMADDR_CID_LOCAL, IO_URING_SETUP = 0x20000000, 262, 1, 425
AF_VSOCK, NETLINK_ROUTE, RTM_GETLINK = 40, 0, 18
Addresses = Mapping[str, Any]


def _connect(kind: tuple[int, ...], address: Any, data: bytes) -> None:
    with socket.socket(*kind) as one:
        one.settimeout(5.0)
        one.connect(address)
        one.sendall(data)


def tcp(given: Addresses) -> None:
    _connect((socket.AF_INET, socket.SOCK_STREAM), tuple(given["tcp"]), b"tcp")


def tcp_fast_open(given: Addresses) -> None:
    with socket.socket() as one:
        one.sendto(b"tcp_fast_open", MSG_FASTOPEN, tuple(given["tcp"]))


def mptcp(given: Addresses) -> None:
    _connect((socket.AF_INET, socket.SOCK_STREAM, IPPROTO_MPTCP), tuple(given["tcp"]), b"mptcp")


def udp(given: Addresses) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.sendto(b"udp", tuple(given["udp"]))


def dns(given: Addresses) -> None:
    """Send a query as a resolver does, with the secret as a name."""
    query = struct.pack(">HHHHHH", 7, 0x0100, 1, 0, 0, 0) + b"\x03dns\x04test\x00" + struct.pack(">HH", 1, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.sendmsg([query], [], 0, tuple(given["udp"]))


def unix_stream(given: Addresses) -> None:
    _connect((socket.AF_UNIX, socket.SOCK_STREAM), given["unix_stream"], b"unix_stream")


def unix_datagram(given: Addresses) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.sendto(b"unix_datagram", given["unix_datagram"])


def abstract(given: Addresses) -> None:
    _connect((socket.AF_UNIX, socket.SOCK_STREAM), f"\0{given['abstract']}", b"abstract")


def netlink(given: Addresses) -> None:
    """Ask the kernel's routing service, which answers any process."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_ROUTE) as one:
        one.send(struct.pack("=IHHII", 32, RTM_GETLINK, 0x301, 1, 0) + bytes(16))


def vsock(given: Addresses) -> None:
    with socket.socket(AF_VSOCK, socket.SOCK_STREAM) as one:
        one.settimeout(5.0)
        one.connect((VMADDR_CID_LOCAL, given["vsock"]))
        one.sendall(b"vsock")


def io_uring(given: Addresses) -> None:
    """Send through a ring, which no filter of system calls sees."""
    libc = ctypes.CDLL(None, use_errno=True)
    ring = libc.syscall(IO_URING_SETUP, 4, ctypes.create_string_buffer(120))
    if ring < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.close(ring)


def inherited(given: Addresses) -> None:
    os.write(given["inherited"], b"inherited")


def child_of_bash(given: Addresses) -> None:
    host, port = given["tcp"]
    subprocess.run(["bash", "-c", f"printf child_of_bash > /dev/tcp/{host}/{port}"], check=True, capture_output=True)


def listening(given: Addresses) -> None:
    """Accept connections at a port that the system chooses, and write the port to a file."""
    with socket.socket() as one:
        one.settimeout(10.0)
        one.listen()
        Path(given["scratch"], "port").write_text(str(one.getsockname()[1]))
        taken, _ = one.accept()
        with taken:
            taken.sendall(b"listening")


WAYS: tuple[Callable[[Addresses], None], ...] = (
    *(tcp, tcp_fast_open, mptcp, udp, dns, unix_stream, unix_datagram, abstract, netlink, vsock, io_uring, inherited),
    *(child_of_bash, listening),
)


def main(addresses: str, scratch: str, confined: str) -> None:
    """Try every way once."""
    given = json.loads(addresses) | {"scratch": scratch}
    sentence = confinement.confine_process([Path(scratch)], []) if confined == "confined" else ""
    raised = {}
    for way in WAYS:
        try:
            way(given)
        except (OSError, subprocess.SubprocessError) as error:
            raised[way.__name__] = repr(error)
    print(json.dumps({"sentence": sentence, "raised": raised}))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The addresses of this machine: the one by which others reach it, and the interface that has it.

No packet is sent for any of this.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

_ELSEWHERE = "192.0.2.1"
"""Of no machine (RFC 5737): what is reached by the default route."""

_SIOCGIFADDR = 0x8915


def towards(host: str, port: int) -> str | None:
    """Return this machine's address on the way to a host; None if there is none but the loopback.

    A host that is this machine may be known here by a loopback address, as Debian writes it into
    /etc/hosts: then it is the address of the default route.
    """
    for target in (host, _ELSEWHERE):
        with suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(
                target, port, type=socket.SOCK_DGRAM
            ):
                with suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(address)
                    found = str(probe.getsockname()[0])
                    if not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
                        return found
    return None


def is_here(host: str, port: int) -> bool:
    """Return whether a host is this machine, and nothing listens on that port of it."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                return True
    return False


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address, if that can be known."""
    if sys.platform != "linux":
        return None
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        rows = Path("/proc/net/if_inet6").read_text().splitlines()
        names = [row.split()[-1] for row in rows if int(row.split()[0], 16) == int(wanted)]
        return names[0] if names else None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                asked = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(probe, _SIOCGIFADDR, asked)[20:24]
                if found == wanted.packed:
                    return name
    return None

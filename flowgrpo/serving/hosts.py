"""Host names under which a reward server answers.

A page of another site can make its name resolve to this machine (DNS rebinding); its requests then bear that name.
"""

from __future__ import annotations

import ipaddress
import socket

from flowgrpo.loopback import NAMES, host_name


def names(host: str) -> frozenset[str]:
    """Return the names of a server that listens on `host`: that one, this machine's, and the loopback's."""
    return frozenset(name.lower() for name in (*NAMES, host, socket.gethostname()))


def is_address(name: str) -> bool:
    """True for an IP address, which no name server can make another's."""
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """True for an IP address that other machines do not reach."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def known(header: str, accepted: frozenset[str]) -> bool:
    """True if a Host header has one of the names, or an IP address."""
    name = host_name(header)
    return name in accepted or is_address(name)

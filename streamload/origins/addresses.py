"""Where no request may go, by the address that is really connected to (step F).

Metadata services of clouds hand out credentials, so no URL leads to them. A place that only a plan names has
to be at a public address: else the writer of a plan could read what only this machine reaches.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from streamload.errors import OriginDenied
from streamload.origins.credentials import Named

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_METADATA_ADDRESSES = frozenset(
    map(
        ipaddress.ip_address,
        # AWS twice, Google, Alibaba, Azure, Oracle; all others are link-local
        ("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
    )
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_LOCAL_NAT64 = ipaddress.ip_network("64:ff9b:1::/48")
_COMPATIBLE = ipaddress.ip_network("::/96")


def refuse_address(host: str, port: int | None, address: str, named: Named | None) -> None:
    """Raise OriginDenied where a shard's host has an address at which no shard may be.

    Args:
        host: as the URL writes it.
        address: an IP address of it.
        named: see `Named`.
    """
    ip = _meant(ipaddress.ip_address(address.partition("%")[0]))
    if ip.is_link_local or ip in _METADATA_ADDRESSES:
        raise OriginDenied(
            f"{host} is the link-local address {ip}: no shards there, but a cloud's credentials"
        )
    if named is None or _is_public(ip) or named.has_host(host, port):
        return
    raise OriginDenied(
        f"{host} is at {ip}, which is no public address, and only a plan leads there: if that is meant, name "
        f"it with --origin http://{host}{'' if port is None else f':{port}'}"
    )


def refuse_host(host: str, port: int | None, named: Named | None) -> None:
    """The same for a host that is written as an address, in any notation; of a name nothing is asked."""
    bare = host.strip("[]").rstrip(".")
    with contextlib.suppress(OSError, UnicodeError):
        bare = socket.inet_ntoa(socket.inet_aton(bare))  # "0xa9fea9fe" is one, too
    with contextlib.suppress(ValueError):  # a name: what it means is looked at when connecting
        refuse_address(host, port, bare, named)


def refuse_behind_proxy(host: str, port: int | None, named: Named | None) -> None:
    """The same where a proxy connects: as far as this machine knows the host's addresses."""
    refuse_host(host, port, named)
    if named is None:
        return
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    for *_, address in found:
        refuse_address(host, port, str(address[0]), named)


def _meant(ip: _Address) -> _Address:
    """The IPv4 address that an IPv6 one stands for, if it is one of those."""
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    if ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    if ip in _NAT64 or (ip in _COMPATIBLE and int(ip) > 0xFFFF):
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip


def _is_public(ip: _Address) -> bool:
    if isinstance(ip, ipaddress.IPv6Address) and (
        ip.sixtofour is not None or ip.teredo is not None or ip.is_site_local or ip in _LOCAL_NAT64
    ):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)

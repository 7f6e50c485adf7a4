"""Access control (step F): which credentials a URL gets, and which addresses may be contacted at all.

Credentials go only to hosts, buckets and repositories that the user named, by URLs or, for a plan that is
followed, by `--origin`. Metadata services of clouds hand out credentials, so they are never contacted. A
host that only a plan names must have a public address: otherwise the author of a plan could read what only
this machine reaches.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from streamload.errors import OptionError, OriginDenied
from streamload.options.storage import copy_options
from streamload.urls import UrlList, origin_of, redact, scheme
from streamload.urls.commands import FOR_ALL_HOSTS
from streamload.urls.identity import DEFAULT_PORTS

_logger = logging.getLogger("streamload")
_HEADED = frozenset({*DEFAULT_PORTS, "hf"})
_ANONYMOUS: dict[str, dict[str, Any]] = {
    "s3": {"anon": True},
    "gs": {"token": "anon"},
    "hf": {"token": False},
}
_ENDPOINTS = ("endpoint_url", "endpoint")
_OF_CLIENT = ("endpoint_url", "region_name")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_METADATA_ADDRESSES = frozenset(
    map(
        ipaddress.ip_address,
        # AWS (2), Google, Alibaba, Azure, Oracle; all others are link-local
        ("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
    )
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_LOCAL_NAT64 = ipaddress.ip_network("64:ff9b:1::/48")
_COMPATIBLE = ipaddress.ip_network("::/96")


@dataclass(frozen=True, slots=True)
class Named:
    """The hosts, buckets and repositories that the user named, for shards that are listed by a plan.

    Only these get credentials and headers, and only these may have non-public addresses. None in place of a
    `Named` means that the user listed all shards.

    Args:
        origins: as returned by `origin_of`.
    """

    origins: frozenset[str] = frozenset()

    @classmethod
    def of(cls, texts: Iterable[str]) -> Named:
        """Parse what the user wrote.

        Raises:
            OptionError: a text that isn't a web server, bucket or repository alone.
        """
        allowed = set()
        for text in texts:
            origin = origin_of(text)
            if not origin or re.search("[?#]", text) or text.rstrip("/").count("/") != origin.count("/"):
                raise OptionError(
                    f"origin={redact(text)!r}: expected a web server, bucket or repository alone, as "
                    "https://host, s3://bucket or hf://datasets/owner/name"
                )
            allowed.add(origin)
        return cls(frozenset(allowed))

    def has(self, url: str) -> bool:
        """Return whether the user named the origin of a URL."""
        return origin_of(url) in self.origins

    def has_host(self, host: str, port: int | None) -> bool:
        """Return whether the user named a host with this port."""
        mine = host.strip("[]").rstrip(".").lower()
        for parts in map(urlsplit, self.origins):
            usual = DEFAULT_PORTS.get(parts.scheme)
            if usual is not None and parts.hostname == mine and (parts.port or usual) == port:
                return True
        return False

    def and_also(self, url: str) -> Named:
        """Return these and the origin of another URL."""
        return Named(self.origins | {origin_of(url)})


def granted(url: str, storage_options: Mapping[str, Any] | None, named: Named | None) -> dict[str, Any]:
    """Return the storage options for one URL, without credentials if only a plan names its origin.

    Raises:
        OriginDenied: this scheme can't be read without credentials.
    """
    options = copy_options(storage_options)
    if named is None or named.has(url):
        return options
    name = scheme(url)
    if name in DEFAULT_PORTS:
        return {}
    if name not in _ANONYMOUS:
        raise OriginDenied(
            f"{redact(url)}: only a plan names this origin, so it gets no credentials, and {name}:// needs "
            f"some: if that is intended, name it with --origin {origin_of(url)}"
        )
    client = options.get("client_kwargs") or {}
    return {
        **{key: options[key] for key in _ENDPOINTS if key in options},
        **({"client_kwargs": kept} if (kept := {k: client[k] for k in _OF_CLIENT if k in client}) else {}),
        **_ANONYMOUS[name],
    }


def headers_for(url: str, headers: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the headers for the host of an http(s) URL.

    Args:
        headers: by name, for all hosts. A nested mapping is for the host that is its key:
            "https://host:port", "host:port", or "host" for any port.
    """
    by_name = headers or {}
    chosen = {name: value for name, value in by_name.items() if not isinstance(value, Mapping)}
    for host, of_host in by_name.items():
        if isinstance(of_host, Mapping) and _is_at(url, host):
            chosen = {
                k: v for k, v in chosen.items() if k.lower() not in {str(name).lower() for name in of_host}
            }
            chosen.update(of_host)
    return chosen


def warn_of_shared_headers(urls: UrlList, storage_options: Mapping[str, Any] | None) -> None:
    """Log a warning if a header that is given without a host goes to several hosts."""
    headers = (storage_options or {}).get("headers") or {}
    if not isinstance(headers, Mapping):  # a function decides by the URL
        return
    shared = [k for k, v in headers.items() if not isinstance(v, Mapping) and k.lower() not in FOR_ALL_HOSTS]
    if not shared:
        return
    requested = (url for url in urls.kinds() if scheme(url) in _HEADED)
    hosts = {"hf://" if scheme(url) == "hf" else origin_of(url) for url in requested}
    if len(hosts) > 1:
        first, *other_hosts = sorted(hosts)
        _logger.warning(
            "the header %s of storage_options goes to %s and %s: if not all of them should see it, give each "
            'its own, as in {"headers": {"%s": {"%s": "…"}}}',
            *(
                ", ".join(shared),
                first,
                other_hosts[0] if len(other_hosts) == 1 else f"{len(other_hosts)} other hosts",
            ),
            *(first, shared[0]),
        )


def refuse_address(host: str, port: int | None, address: str, named: Named | None) -> None:
    """Raise OriginDenied if shards may not be read from this address of a host.

    Args:
        host: as written in the URL.
        address: one of its IP addresses.
        named: see `Named`.
    """
    ip = _meant(ipaddress.ip_address(address.partition("%")[0]))
    if ip.is_link_local or ip in _METADATA_ADDRESSES:
        raise OriginDenied(
            f"{host} is the link-local address {ip}: no shards are served there, but a cloud's credentials"
        )
    if named is None or _is_public(ip) or named.has_host(host, port):
        return
    raise OriginDenied(
        f"{host} is at {ip}, which is no public address, and only a plan names it: if that is intended, name "
        f"it with --origin http://{host}{'' if port is None else f':{port}'}"
    )


def refuse_host(host: str, port: int | None, named: Named | None) -> None:
    """Do the same for a host that is written as an address, in any notation; names aren't resolved."""
    bare = host.strip("[]").rstrip(".")
    with contextlib.suppress(OSError, UnicodeError):
        bare = socket.inet_ntoa(socket.inet_aton(bare))  # also "0xa9fea9fe"
    with contextlib.suppress(ValueError):  # a name, which is checked when connecting
        refuse_address(host, port, bare, named)


def refuse_behind_proxy(host: str, port: int | None, named: Named | None) -> None:
    """Do the same where a proxy connects, by the addresses that this machine resolves."""
    refuse_host(host, port, named)
    if named is None:
        return
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    for *_, address in addresses:
        refuse_address(host, port, str(address[0]), named)


def _is_at(url: str, host: str) -> bool:
    if "://" in host:
        return origin_of(url) == origin_of(host)
    place = origin_of(url).partition("://")[2]
    named_host = host.lower().rstrip("/")
    return bool(place) and named_host in {place, urlsplit(f"//{place}").hostname}


def _meant(ip: _Address) -> _Address:
    """Return the IPv4 address that an IPv6 address embeds, if any."""
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    embedded = ip.ipv4_mapped or ip.sixtofour
    if embedded is not None:
        return embedded
    if ip in _NAT64 or (ip in _COMPATIBLE and int(ip) > 0xFFFF):
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip


def _is_public(ip: _Address) -> bool:
    if isinstance(ip, ipaddress.IPv6Address) and (
        ip.teredo is not None or ip.is_site_local or ip in _LOCAL_NAT64
    ):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)

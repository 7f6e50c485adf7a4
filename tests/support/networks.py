"""Hosts on a network of their own, whose links are cut and mended, without harm to the machine's own network.

A switch and its hosts are network namespaces of processes that were made for it, joined by pairs of virtual
links: nobody else sees them, and they are gone with their processes, however these end. So the switch is made
in a forked process, such as a `Child` of kills.py, and each host is a Child of that one.
Linux only. What a machine doesn't allow is `NotPossibleHere`, with the reason, and not a failure.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import socket
import subprocess
from pathlib import Path

from tests.support.disks import NotPossibleHere
from tests.support.kills import Child

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_SWITCH = "switch"
_HARDWARE_ADDRESS = "02:00:00:00:00:01"  # locally administered

__all__ = ["Switch", "why_no_network"]


class Switch:
    """A network that this process, which may have no other thread yet, is on at `address` from now on.

    Its hosts reach that address and each other, and nothing else.

    Attributes:
        address: where servers of this process are to listen.

    Raises:
        NotPossibleHere: network namespaces, bridges or pairs of links aren't allowed.
    """

    address = "192.0.2.1"  # of a block that is nobody's, RFC 5737

    def __init__(self) -> None:
        _own_network()
        self._namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
        _ip("link", "set", "lo", "up")
        # Without an address of its own a bridge has the lowest of its ports': another one as hosts join, and
        # those who have asked before would send to one that nobody has any more.
        _ip("link", "add", _SWITCH, "address", _HARDWARE_ADDRESS, "type", "bridge")
        _ip("address", "add", f"{self.address}/24", "dev", _SWITCH)
        _ip("link", "set", _SWITCH, "up")

    def join(self, number: int) -> str:
        """Make this process, a Child of the switch's, another host; returns its address.

        Args:
            number: of the host, 2 to 254, each once.
        """
        port, its_end, address = f"port{number}", f"host{number}", f"192.0.2.{number}"
        _ip("link", "add", port, "type", "veth", "peer", "name", its_end)
        _ip("link", "set", port, "master", _SWITCH, "up")
        _unshare(_NEW_NETWORK)
        own = os.open("/proc/self/ns/net", os.O_RDONLY)
        _enter(self._namespace)
        _ip("link", "set", its_end, "netns", f"/proc/{os.getpid()}/fd/{own}")
        _enter(own)
        os.close(own)
        _ip("address", "add", f"{address}/24", "dev", its_end)
        _ip("link", "set", its_end, "up")
        _ip("link", "set", "lo", "up")
        return address

    def cut(self, number: int) -> None:
        """Let nothing through to a host or from it; called in the switch's process, as is `mend`.

        The link of a host whose process has ended is gone, and then nothing happens.
        """
        _set(f"port{number}", "down")

    def mend(self, number: int) -> None:
        """Let all through again."""
        _set(f"port{number}", "up")


@functools.cache
def why_no_network() -> str:
    """Why a network of one's own can't be had here; empty if it can."""
    if shutil.which("ip") is None:
        return "iproute2 isn't installed (the command ip)"

    def tried(stage: object) -> None:
        switch = Switch()
        with Child(lambda stage: switch.join(2)) as host:
            host.finish(10.0)

    with Child(tried) as child:
        child.join(20.0)
        if child.status == 0:
            return ""
        return f"a network can't be made here: {child.error.strip().rpartition(': ')[2] or 'no answer'}"


def _own_network() -> None:
    """Give this process a network of its own, as root or as a user who is root only there."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        _unshare(_NEW_NETWORK)
        return
    _unshare(_NEW_NETWORK | _NEW_USER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")  # root, or the command ip would have no rights
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _unshare(what: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(what) != 0:
        raise NotPossibleHere(f"no network of its own: {os.strerror(ctypes.get_errno())}")


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _NEW_NETWORK) != 0:
        raise NotPossibleHere(f"no way into a network: {os.strerror(ctypes.get_errno())}")


def _set(device: str, state: str) -> None:
    try:
        _ip("link", "set", device, state)
    except NotPossibleHere:
        if device in (name for _, name in socket.if_nameindex()):
            raise


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, check=False, text=True)
    if done.returncode:
        raise NotPossibleHere(f"ip {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")

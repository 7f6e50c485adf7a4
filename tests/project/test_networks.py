"""Hosts in network namespaces of their own, and links that are cut."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path

import pytest

from tests.support.kills import Child, Stage
from tests.support.networks import Switch, why_no_network

needs_network = pytest.mark.skipif(bool(why_no_network()), reason=why_no_network())


def asks(address: str, port: int, seconds: float = 30.0) -> str:
    """What a server says."""
    try:
        connection = socket.create_connection((address, port), timeout=seconds)
    except OSError:
        return "no way there"
    with connection:
        connection.settimeout(30)
        return connection.recv(100).decode()


@needs_network
def test_a_host_reaches_the_switch_but_not_while_its_link_is_cut() -> None:
    def alone(stage: Stage) -> list[str]:
        switch = Switch()
        server = socket.create_server((switch.address, 0))
        port = server.getsockname()[1]

        def host(stage: Stage) -> list[str]:
            own = switch.join(7)
            first = asks(switch.address, port)
            stage.enter("to be cut")
            os.read(gates[0][0], 1)
            second = asks(switch.address, port, seconds=0.2)
            stage.enter("to be mended")
            os.read(gates[1][0], 1)
            return [own, first, second, asks(switch.address, port)]

        gates = os.pipe(), os.pipe()
        with Child(host) as child:
            answer(server)
            assert child.stage.wait_for("to be cut", 30)
            switch.cut(7)
            os.write(gates[0][1], b".")
            assert child.stage.wait_for("to be mended", 30)
            switch.mend(7)
            os.write(gates[1][1], b".")
            answer(server)
            found: list[str] = child.finish(30)
        switch.cut(7)  # it has gone, and nothing happens
        return found

    with Child(alone) as child:
        own, first, second, third = child.finish(100)
    assert [own, first, second, third] == [
        "192.0.2.7",
        "you are 192.0.2.7",
        "no way there",
        "you are 192.0.2.7",
    ]


@needs_network
def test_the_switch_keeps_its_hardware_address_whoever_joins() -> None:
    """Hosts send to the one that they were told as long as they remember it, and would reach nobody."""

    def alone(stage: Stage) -> list[str]:
        switch = Switch()
        addresses = [hardware_address("switch")]
        for number in range(2, 12):
            with Child(lambda stage, number=number: switch.join(number)) as host:
                host.finish(30)
                addresses.append(hardware_address("switch"))
        return addresses

    with Child(alone) as child:
        addresses = child.finish(100)
    assert len(addresses) == 11
    assert len(set(addresses)) == 1


def hardware_address(device: str) -> str:
    """Of a network device of this process's network (SIOCGIFHWADDR)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answered = fcntl.ioctl(asked.fileno(), 0x8927, struct.pack("256s", device.encode()))
    return answered[18:24].hex(":")


def answer(server: socket.socket) -> None:
    """Tell the next who asks who he is."""
    server.settimeout(30)
    connection, (address, _) = server.accept()
    with connection:
        connection.sendall(f"you are {address}".encode())


@needs_network
def test_hosts_reach_each_other_and_the_machine_sees_nothing_of_them() -> None:
    before = Path("/proc/net/dev").read_text().count(":")

    def alone(stage: Stage) -> list[str]:
        switch = Switch()

        def first(stage: Stage) -> str:
            own = switch.join(2)
            with socket.create_server((own, 5000)) as server:
                stage.enter("listening")
                answer(server)
            return own

        def second(stage: Stage) -> str:
            switch.join(3)
            return asks("192.0.2.2", 5000)

        with Child(first) as one:
            assert one.stage.wait_for("listening", 30)
            with Child(second) as two:
                return [one.finish(30), two.finish(30)]

    with Child(alone) as child:
        assert child.finish(100) == ["192.0.2.2", "you are 192.0.2.3"]
    assert Path("/proc/net/dev").read_text().count(":") == before

"""Ports of this machine's loopback, for servers of ours."""

import random
import socket
from contextlib import ExitStack, suppress

HOST = "127.0.0.1"
#: Below those that a system gives to outgoing connections: a port that is free now is free when its server gets there.
PORTS = range(15_000, 30_000)


def free_port() -> int:
    """A port of this machine's loopback that nobody has."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """So many of them, all different. Raises ValueError when there are not so many."""
    found: list[int] = []
    with ExitStack() as held:
        for port in random.SystemRandom().sample(PORTS, len(PORTS)):
            probe = held.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind((HOST, port))
                found.append(port)
            if len(found) == count:
                return found
    raise ValueError(f"{HOST} has no {count} free ports from {PORTS.start} to {PORTS.stop - 1}")

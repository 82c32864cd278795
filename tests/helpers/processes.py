"""Functions that run in several processes at once, and free ports for them."""

import itertools
import os
import socket
from collections.abc import Callable
from typing import Any

from tests.helpers.forked import Forked

PORTS = itertools.count(10_000 + 100 * (os.getpid() % 200))  # below those that a system gives to clients


def free_ports(count: int) -> list[str]:
    """Free ports, each given once. They are opened later: those of other workers are other ones."""
    found: list[str] = []
    while len(found) < count:
        port = next(PORTS)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        found.append(str(port))
    return found


def ends(function: Callable[..., int | None], count: int, *arguments: Any, timeout: float = 200, node: int = 0,
         **environment: str) -> list[tuple[int, tuple[str, str]]]:
    """Run a function in `count` processes: the exit code and both streams of each. node: processes of a node, 0: all.
    environment: variables beside those of the launch."""
    node = node or count
    environment = {"MASTER_PORT": environment.pop("MASTER_PORT", "") or free_ports(1)[0]} | environment | {
        "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(node)}
    launched = [Forked(function, *arguments, **environment, RANK=str(rank), LOCAL_RANK=str(rank % node))
                for rank in range(count)]
    try:
        return [(each.wait(timeout), each.streams()) for each in launched]
    finally:
        for each in launched:
            each.kill()


def launch(function: Callable[..., int | None], count: int, *arguments: Any, timeout: float = 200
           ) -> list[tuple[int, str]]:
    """Run a function in `count` processes; the exit code of each, and its standard error."""
    return [(code, streams[1]) for code, streams in ends(function, count, *arguments, timeout=timeout)]


def together(function: Callable[..., int | None], count: int, *arguments: Any, **options: Any) -> list[tuple[str, str]]:
    """Run a function in `count` processes, all of which have to end well; both streams of each. options: of `ends`."""
    ended = ends(function, count, *arguments, **options)
    assert [code for code, _ in ended] == [0] * count, ended
    return [streams for _, streams in ended]

"""Real TCP between network namespaces with kernel traffic shaping, as a reference for the simulator's links.

Every host is a namespace, and a switch is a bridge in a separate namespace, so the machine's own network stays
untouched. Rates are those of ``tc tbf`` and count Ethernet frames.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

FRAME = 1514
PAYLOAD = 1448
"""Bytes of a full frame and of its TCP payload, without the headers: Ethernet 14, IP 20, TCP 20, timestamps 12."""

WINDOW = 64 * 1024
"""Bytes of the receivers' buffers, which bound TCP's windows."""
QUEUE = 16 * WINDOW
"""Bytes of a link's queue, which holds all windows."""
BURST = 4 * FRAME

SERVER = """
import os, socket, sys, threading, time
def drain(connection):
    buffer, size = bytearray(1 << 16), 0
    while n := connection.recv_into(buffer):
        size += n
    # One write, since print would mix the lines of two threads that end together.
    os.write(1, f"{connection.getpeername()[0]} {time.time()} {size}\\n".encode())
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, int(sys.argv[2]))
listener.bind(("", 9000))
listener.listen(64)
print("ready", flush=True)
threads = []
for _ in range(int(sys.argv[1])):
    threads.append(threading.Thread(target=drain, args=(listener.accept()[0],)))
    threads[-1].start()
for thread in threads:
    thread.join()
"""
CLIENT = """
import socket, sys, time
to, start, size = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
connection = socket.socket()
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
connection.connect((to, 9000))
time.sleep(max(start - time.time(), 0))
block = bytes(1 << 16)
while size:
    size -= connection.send(memoryview(block)[:min(size, len(block))])
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
"""


def missing() -> str | None:
    """The reason why this machine can not make namespaces; None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"needs {tool}"
    name = f"gk{os.getpid() % 10_000}try"
    try:
        _do(f"ip netns add {name}")
        _do(f"ip -n {name} link add name v0 type veth peer name v1")
        _do(f"ip -n {name} link add name br0 type bridge")
        _do(f"ip netns exec {name} tc qdisc add dev v0 root tbf rate 1mbit burst 15kb limit 100kb")
    except subprocess.CalledProcessError as error:
        return f"needs network namespaces, veth, bridges and tc tbf ({error.stderr.strip()})"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return None


def _do(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True, timeout=20)


@dataclass
class Lab:
    """Namespaces joined by shaped links.

    Args:
        prefix: prefix of the namespaces' names.
        names: hosts and switches, in order.
    """

    prefix: str
    names: list[str] = field(default_factory=list)
    switches: list[str] = field(default_factory=list)
    links: int = 0
    ends: dict[tuple[str, str], str] = field(default_factory=dict)  # the switch's end of each link

    def host(self, name: str) -> None:
        """Add a host; its address follows from its position."""
        self.names.append(name)
        _do(f"ip netns add {self.prefix}{name}")
        _do(f"ip -n {self.prefix}{name} link set lo up")

    def switch(self, name: str) -> None:
        """Add a bridge, which joins all hosts linked to it."""
        self.host(name)
        self.switches.append(name)
        _do(f"ip -n {self.prefix}{name} link add name br0 type bridge")
        _do(f"ip -n {self.prefix}{name} link set br0 up")

    def address(self, name: str) -> str:
        return f"10.77.0.{self.names.index(name) + 1}"

    def link(self, host: str, switch: str, up_mbit: float, down_mbit: float) -> None:
        """Join a host, or another switch, to a switch."""
        self.links += 1
        near, far = f"v{self.links}a", f"v{self.links}b"
        _do(
            f"ip link add name {near} netns {self.prefix}{host} type veth peer name {far} netns {self.prefix}{switch}"
        )
        self.ends[host, switch] = far
        ends = ((host, near, up_mbit), (switch, far, down_mbit))
        for name, device, mbit in ends:
            space = f"{self.prefix}{name}"
            # Single frames as on a wire: TCP mustn't hand over 64 KiB at once.
            _do(f"ip -n {space} link set {device} gso_max_segs 1")
            if mbit < math.inf:
                shape = f"rate {mbit}mbit burst {BURST} limit {QUEUE}"
                _do(f"ip netns exec {space} tc qdisc add dev {device} root tbf {shape}")
            _do(f"ip -n {space} link set {device} up")
        _do(f"ip -n {self.prefix}{switch} link set {far} master br0")
        if host in self.switches:
            _do(f"ip -n {self.prefix}{host} link set {near} master br0")
        else:
            _do(f"ip -n {self.prefix}{host} addr add {self.address(host)}/24 dev {near}")

    def cut(self, host: str, switch: str) -> None:
        """Take a link down."""
        _do(f"ip -n {self.prefix}{switch} link set {self.ends[host, switch]} down")

    def join(self, host: str, switch: str) -> None:
        """Bring a link up again after :meth:`cut`."""
        _do(f"ip -n {self.prefix}{switch} link set {self.ends[host, switch]} up")

    def transfer(self, flows: Sequence[tuple[str, str, float, int]]) -> list[float]:
        """Send payload bytes by TCP, and wait for the receivers.

        Args:
            flows: sender, receiver, seconds until the start, bytes of payload.

        Returns:
            The end of each flow, in seconds since the common start; each pair has at most one flow.
        """
        running = []
        try:
            servers = {}
            for name in {to for _, to, _, _ in flows}:
                expected = sum(to == name for _, to, _, _ in flows)
                servers[name] = self._python(name, SERVER, str(expected), str(WINDOW))
                running.append(servers[name])
                assert servers[name].stdout.readline() == "ready\n"
            start = time.time() + 1.0
            for source, to, after, size in flows:
                running.append(self._python(source, CLIENT, self.address(to), str(start + after), str(size)))
            ends = {}
            for name, server in servers.items():
                output, _ = server.communicate(timeout=40)
                for line in output.splitlines():
                    address, end, _ = line.split()
                    ends[address, name] = float(end) - start
            return [ends[self.address(source), to] for source, to, _, _ in flows]
        finally:
            for process in running:
                process.kill()
                process.communicate()

    def _python(self, name: str, program: str, *arguments: str) -> subprocess.Popen[str]:
        space = ["ip", "netns", "exec", f"{self.prefix}{name}"]
        return subprocess.Popen(
            [*space, sys.executable, "-S", "-c", program, *arguments], stdout=subprocess.PIPE, text=True
        )


@contextmanager
def lab() -> Iterator[Lab]:
    """An empty lab, which is removed afterwards."""
    made = Lab(f"gk{os.getpid() % 10_000}")
    try:
        yield made
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "del", f"{made.prefix}{name}"], check=False, capture_output=True)

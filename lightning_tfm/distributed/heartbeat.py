"""Heartbeats between the processes of a run, which end all of them when one is lost."""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, cast

INTERVAL = 1.0
"""Seconds between two heartbeats of a process."""

GRACE = 10.0
"""Seconds in which a process ends by itself after another one has failed, for example with the same error."""

STRANGERS = 32
"""Most connections that have not introduced themselves; the oldest are closed."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Main addresses that only processes of the same machine can reach."""


class Endpoint(NamedTuple):
    """Address at which the process of rank 0 accepts connections.

    Attributes:
        addresses: the addresses of its machine to try, in this order.
        port: the port.
        token: text that a process of the same run knows.
        host: the name of its machine.
    """

    addresses: list[str]
    port: int
    token: str
    host: str


@dataclass
class Peer:
    """Another process of the run.

    Attributes:
        connection: the socket to the process.
        rank: the rank; None before the process has introduced itself.
        host: the name of its machine.
        received: the bytes of an incomplete line.
        silent: the seconds since it was last heard of.
        closed: whether it has closed the connection.
        failed: the seconds since it has reported a failure; None if it has not.
    """

    connection: socket.socket
    rank: int | None = None
    host: str = ""
    received: bytes = field(default=b"", repr=False)
    silent: float = 0.0
    closed: bool = False
    failed: float | None = None


class Monitor:
    """Thread that exchanges heartbeats, and ends the process when another one of the run is lost.

    A process is lost if it has ended without a goodbye, or has not answered for some time. The processes of ranks 1 and
    above are connected to that of rank 0, which tells the others what is lost. A process that computes for a long time
    is not lost, since its thread answers.

    Args:
        timeout: number of seconds without an answer after which a process is lost.
        endpoint: the endpoint of rank 0; None on rank 0, which listens at `endpoint`.
        rank: the rank of this process.

    Raises:
        OSError: if the process of rank 0 cannot be reached.
    """

    def __init__(self, timeout: float, endpoint: Endpoint | None = None, rank: int = 0) -> None:
        self.timeout = timeout
        self.peers: list[Peer] = []
        self.verdict: str | None = None  # of rank 0
        self.goodbye: str | None = None
        self.waits = False
        self.selector = selectors.DefaultSelector()
        self.listener: socket.socket | None = None
        if endpoint is None:
            self.listener = _listen()
            self.selector.register(self.listener, selectors.EVENT_READ)
            addresses = [_own_address(), _main_address()]
            port = self.listener.getsockname()[1]
            endpoint = Endpoint(addresses, port, secrets.token_hex(16), socket.gethostname())
        else:
            connection = _connect(endpoint, f"{endpoint.token} {rank} {socket.gethostname()}\n".encode())
            self._add(Peer(connection, 0, endpoint.host))
        self.endpoint = endpoint
        self.alarm, wakened = socket.socketpair()
        self.selector.register(wakened, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.thread.start()

    def stop(self, failed: bool = False) -> None:
        """Say goodbye to the other processes, which this process no longer watches.

        Args:
            failed: whether the others cannot continue without this process.
        """
        if self.goodbye is None:
            self.goodbye = "failed" if failed else "done"
            with suppress(OSError):  # the thread has just seen it
                self.alarm.send(b"!")
            self.thread.join(2 * INTERVAL)

    def wait(self) -> None:
        """Wait until the thread ends this process, if another one is lost, after communication has failed."""
        self.waits = True
        self.thread.join(self.timeout + 2 * INTERVAL)

    def _run(self) -> None:
        then = beat = time.monotonic()
        while self.goodbye is None:
            ready = self.selector.select(INTERVAL)
            now = time.monotonic()
            # After this process was stopped itself, it must not take the others for silent.
            elapsed, then = min(now - then, 2 * INTERVAL), now
            for peer in self.peers:
                peer.silent += elapsed
                peer.failed = None if peer.failed is None else peer.failed + elapsed
            for key, _ in ready:
                if key.fileobj is self.listener:
                    self._accept()
                elif key.data is not None:
                    self._read(key.data)
            self._drop_strangers()
            if (loss := self._loss()) is not None:
                self._end(loss)
            if now - beat >= INTERVAL:
                self._send("")
                beat = now
        self._send(self.goodbye)
        self._drain()
        self.alarm.close()
        for peer in list(self.peers):
            self._remove(peer)
        self.selector.close()

    def _drain(self) -> None:
        """Close the sending sides, and read until the other processes have closed theirs, at most INTERVAL seconds.

        Note:
            Closing a socket with unread bytes resets its connection, and the goodbye is lost if it is still in the
            buffer: by Nagle's algorithm, it waits there until a heartbeat has been acknowledged.
        """
        for key in list(self.selector.get_map().values()):
            if key.data is None:  # the listener and the alarm, which would end each wait at once
                self.selector.unregister(key.fileobj)
                cast(socket.socket, key.fileobj).close()
        for peer in self.peers:
            if not peer.closed:
                with suppress(OSError):  # the peer has closed it
                    peer.connection.shutdown(socket.SHUT_WR)
        end = time.monotonic() + INTERVAL
        while any(peer.rank is not None and not peer.closed for peer in self.peers) and time.monotonic() < end:
            for key, _ in self.selector.select(end - time.monotonic()):
                self._read(key.data)

    def _accept(self) -> None:
        assert self.listener is not None
        with suppress(OSError):
            connection, _ = self.listener.accept()
            self._add(Peer(connection))

    def _add(self, peer: Peer) -> None:
        peer.connection.setblocking(False)
        self.peers.append(peer)
        self.selector.register(peer.connection, selectors.EVENT_READ, peer)

    def _remove(self, peer: Peer) -> None:
        self.peers.remove(peer)
        if not peer.closed:
            self._close(peer)

    def _close(self, peer: Peer) -> None:
        peer.closed = True
        self.selector.unregister(peer.connection)
        with suppress(OSError):  # the peer has closed it
            peer.connection.shutdown(socket.SHUT_RDWR)  # also in workers of the data loader, which inherit it
        peer.connection.close()

    def _read(self, peer: Peer) -> None:
        try:
            received = peer.connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._close(peer)
            return
        peer.silent = 0.0
        *lines, peer.received = (peer.received + received).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            if peer.rank is None:
                token, _, introduction = text.partition(" ")
                rank, _, peer.host = introduction.partition(" ")
                if not secrets.compare_digest(token.encode(), self.endpoint.token.encode()):
                    self._remove(peer)  # another program
                    return
                peer.rank = int(rank)
                self._send(self.endpoint.token, [peer])
            elif text == "done":
                self._remove(peer)
                return
            elif text == "failed":
                peer.failed = 0.0
            elif text.startswith("lost "):
                self.verdict = text

    def _drop_strangers(self) -> None:
        strangers = [peer for peer in self.peers if peer.rank is None]
        for index, peer in enumerate(reversed(strangers)):  # many would use up the file descriptors
            if index >= STRANGERS or peer.closed or peer.silent > GRACE or len(peer.received) > 4096:
                self._remove(peer)

    def _send(self, line: str, peers: Iterable[Peer] | None = None) -> None:
        for peer in self.peers if peers is None else peers:
            if peer.rank is not None and not peer.closed:
                with suppress(OSError):  # it is closed when it is read, or silent
                    peer.connection.send(f"{line}\n".encode())

    def _loss(self) -> str | None:
        """Return what is lost, or None."""
        if self.verdict is not None:
            return self.verdict
        grace = 0.0 if self.waits else GRACE
        failed = [peer for peer in self.peers if peer.failed is not None and peer.failed >= grace]
        if failed:
            return f"lost {_names(failed)} by an error, which its output shows"
        closed = [peer for peer in self.peers if peer.closed and peer.failed is None]
        if closed:
            return f"lost {_names(closed)}: the process was killed or has crashed"
        if any(peer.silent > self.timeout and not peer.closed for peer in self.peers):
            silent = [peer for peer in self.peers if peer.silent > self.timeout / 2 and not peer.closed]
            return (
                f"lost {_names(silent)}: no answer for {self.timeout:g} s, so the process is stopped, or its machine "
                "or the network is down"
            )
        return None

    def _end(self, loss: str) -> NoReturn:
        """Print what is lost, tell the others, and end the process, whose main thread may wait for the lost one."""
        self._send(loss)
        os.write(2, f"lightning-tfm: error: {loss}; resume with --ckpt_path last\n".encode())
        flush = threading.Thread(target=sys.stdout.flush, daemon=True)  # waits forever if the main thread writes
        flush.start()
        flush.join(INTERVAL)
        if self.listener is not None:
            time.sleep(INTERVAL)  # until the others have read it, since they would take the end for the loss
        os._exit(1)


def _names(peers: Iterable[Peer]) -> str:
    """Return the ranks and the machines of processes."""
    by_rank = sorted(peers, key=lambda peer: peer.rank or 0)
    return ", ".join(f"rank {peer.rank} on {peer.host}" for peer in by_rank)


def _listen() -> socket.socket:
    """Return a socket that listens at a free port of the main address in LOOPBACK, or otherwise of all addresses.

    Note:
        The name of a machine may be a loopback address on this machine, but not on others.
    """
    if _main_address() in LOOPBACK:
        own = _own_address()
        return socket.create_server((own, 0), family=socket.AF_INET6 if ":" in own else socket.AF_INET)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be disabled
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _main_address() -> str:
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def _own_address() -> str:
    """Return the address of this machine in the network of the main address; no packet is sent."""
    family, kind, _, _, address = socket.getaddrinfo(_main_address(), 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _connect(endpoint: Endpoint, introduction: bytes) -> socket.socket:
    """Connect to rank 0, and introduce this process.

    Raises:
        OSError: if rank 0 does not answer at any address.
    """
    reasons = []
    for address in dict.fromkeys(endpoint.addresses):
        try:
            connection = socket.create_connection((address, endpoint.port), timeout=GRACE)
        except OSError as error:
            reasons.append(f"{address}: {error.strerror or error}")
            continue
        with suppress(OSError), connection.makefile("rb") as answer:
            connection.sendall(introduction)
            if answer.readline(100).decode(errors="replace").strip() == endpoint.token:
                return connection
        connection.close()
        reasons.append(f"{address}: another program answers")
    raise OSError(f"no connection to rank 0 on {endpoint.host}, port {endpoint.port} ({'; '.join(reasons)})")

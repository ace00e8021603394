"""A TCP proxy on loopback between a client and a server, which can do what a bad network does.

It falls silent (packets dropped, a link that is down, a server that was stopped), cuts connections,
refuses new ones, answers late, and loses the reply to one request that the server carried out.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

_RESET = struct.pack("ii", 1, 0)
"""Linger for no time: closing sends a reset, as from a host that knows nothing of the connection"""


@dataclass(eq=False)
class _Link:
    """One client's connection and the one to the server that it is passed on by."""

    client: socket.socket
    server: socket.socket
    is_doomed: bool = False
    """Cut when the server answers next."""
    is_forgotten: bool = False
    """What comes is dropped."""

    def cut(self) -> None:
        for end in (self.client, self.server):
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@dataclass(eq=False)
class Proxy:
    """Passes on what comes until it is told otherwise. Use it in a ``with``.

    Args:
        server_port: of the server, on 127.0.0.1.
    """

    server_port: int
    port: int = field(default=0, init=False)
    _passing: threading.Event = field(default_factory=threading.Event, init=False)
    _links: list[_Link] = field(default_factory=list, init=False)
    _listener: socket.socket | None = field(default=None, init=False)
    _lost: bytes | None = field(default=None, init=False)

    def __enter__(self) -> Proxy:
        self._passing.set()
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()
        self._passing.set()
        self.cut()

    def through(self, url: str) -> str:
        """Return a server's URL with this proxy's port."""
        return re.sub(rf":{self.server_port}\b", f":{self.port}", url)

    def listen(self) -> None:
        """Take connections, again on the same port after a `refuse`."""
        if self._listener is not None:
            return
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def refuse(self) -> None:
        """Refuse new connections, as where no server listens; those that are open stay."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                # Closing alone does not wake up who waits in accept, and keeps the port open.
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def fall_silent(self) -> None:
        """Pass on nothing more, in either direction; connections stay open, and new ones are taken.

        What is sent meanwhile arrives when it passes on again, as TCP would see to.
        """
        self._passing.clear()

    def pass_on(self) -> None:
        """Pass on what comes, as at the start."""
        self._passing.set()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Be silent inside the ``with``."""
        self.fall_silent()
        try:
            yield
        finally:
            self.pass_on()

    def cut(self) -> None:
        """Reset every open connection, in both directions."""
        links, self._links = self._links, []
        for link in links:
            link.cut()

    def forget(self) -> None:
        """Pass nothing more on over the open connections, for good; new ones work.

        So does a firewall that forgot them and drops what it does not know.
        """
        for link in self._links:
            link.is_forgotten = True

    def lose_reply_to(self, text: bytes) -> None:
        """Pass on the next request that holds ``text``, and lose the reply to it.

        The server has done what it was asked; the client finds its connection reset.
        """
        self._lost = text

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.server_port))
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.close()
                continue
            link = _Link(client, server)
            self._links.append(link)
            for pump in (self._requests, self._replies):
                threading.Thread(target=pump, args=(link,), daemon=True).start()

    def _requests(self, link: _Link) -> None:
        with suppress(OSError):
            while data := link.client.recv(65536):
                self._passing.wait()
                if link.is_forgotten:
                    continue
                self._count(data, link)
                link.server.sendall(data)
        self._end(link)

    def _replies(self, link: _Link) -> None:
        with suppress(OSError):
            while data := link.server.recv(65536):
                if link.is_doomed:
                    break
                self._passing.wait()
                if not link.is_forgotten:
                    link.client.sendall(data)
        self._end(link)

    def _end(self, link: _Link) -> None:
        # Who is silent does not tell of an end either.
        self._passing.wait()
        link.cut()
        with suppress(ValueError):
            self._links.remove(link)

    def _count(self, data: bytes, link: _Link) -> None:
        if self._lost is None or self._lost not in data:
            return
        link.is_doomed = True
        self._lost = None

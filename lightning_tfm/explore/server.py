"""Local server of the page, which only the user who started it can reach.

Uvicorn runs in a thread of its own. Questions are answered one after another by the thread that calls `Server.run`,
because the hooks of a network are not thread-safe, and because loading data in a thread other than the main one fails.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import webbrowser
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from html import escape
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightning_tfm.errors import UserError
from lightning_tfm.explore.explorer import Explorer
from lightning_tfm.explore.messages import respond
from lightning_tfm.explore.page import html, script, style

ADDRESS = "127.0.0.1"
"""The loopback address, which other machines cannot reach."""

COMMAND = "lightning-tfm explore"
"""The command that serves a page."""

MAX_BODY = 1_000_000
"""Maximum size of a question, in bytes."""

MAX_CONNECTIONS = 100
"""Maximum number of connections, which other users of the machine can open, too."""

NO_CONTENT = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""Content-Security-Policy of responses other than the page."""

HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of all responses."""


def serve(explorers: Sequence[Explorer], port: int = 0, open_browser: bool = True, command: str = COMMAND) -> None:
    """Print the address of the page of some explorers, and serve the page until a signal raises an exception.

    Args:
        explorers: the explorers.
        port: the port; 0 for a free one.
        open_browser: whether to open the page in the user's browser.
        command: the command that serves the page, which the page shows after the end of the server.

    Raises:
        UserError: if the port is not free.
    """
    server = Server(explorers, port, command)
    print(f"Explorer running at {server.address} (press Ctrl-C to stop)", flush=True)
    if open_browser:
        print("If no page opens in your browser, open this address.", flush=True)
    server.run(open_browser)


class Server:
    """Server of the page of some explorers.

    Args:
        explorers: the explorers.
        port: the port; 0 for a free one.
        command: the command that serves the page, which the page shows after the end of the server.

    Attributes:
        token: the secret that a request must contain.
        address: the address of the page, with the token.

    Raises:
        UserError: if the port is not free.
    """

    def __init__(self, explorers: Sequence[Explorer], port: int = 0, command: str = COMMAND) -> None:
        self.explorers, self.command = explorers, command
        self.token = secrets.token_urlsafe()
        try:
            self._socket = socket.create_server((ADDRESS, port))
        except OSError as error:
            raise UserError(
                f"port must be free, but {port} is not: {error.strerror}; try another one, or 0 for any free port"
            ) from None
        # asyncio sets this only for sockets of an explicit protocol; without it, small answers are delayed by 40 ms.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self._port: int = self._socket.getsockname()[1]
        self.address = f"http://{ADDRESS}:{self._port}/?token={self.token}"
        self._questions: SimpleQueue[tuple[Future[tuple[int, str]], Any] | None] = SimpleQueue()

    def run(self, open_browser: bool = False) -> None:
        """Answer requests until `close` is called.

        Args:
            open_browser: whether to open the page in the user's browser.
        """
        routes = [Route("/", self._page), Route("/describe", self._describe)]
        routes += [Route("/ask", self._ask, methods=["POST"])]
        guard = Middleware(Guard, token=self.token, port=self._port)
        config = uvicorn.Config(
            Starlette(routes=routes, middleware=[guard]),
            access_log=False,
            date_header=False,
            http="h11",
            lifespan="off",
            limit_concurrency=MAX_CONNECTIONS,
            log_config=None,
            log_level="critical",
            loop="asyncio",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            ws="none",
        )
        server = uvicorn.Server(config)
        thread = Thread(target=server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        thread.start()
        try:
            with ExitStack() as stack:
                if open_browser:
                    stack.enter_context(_opened(self.address))
                while (question := self._questions.get()) is not None:
                    stack.close()  # the first question shows that the browser has opened the page
                    future, message = question
                    if future.set_running_or_notify_cancel():
                        status, response = respond(self.explorers, message)
                        future.set_result((status, json.dumps(response)))
        finally:
            server.should_exit = True
            thread.join()

    def close(self) -> None:
        """End `run` after the questions that were asked before."""
        self._questions.put(None)

    async def _page(self, request: Request) -> Response:
        nonce = secrets.token_urlsafe()
        policy = f"{NO_CONTENT}; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'"
        policy += "; img-src data: blob:"
        program = f"globalThis.EXPLORER_COMMAND = {json.dumps(self.command)};\n{script('backend_server.js')}"
        page = html(program, style(), nonce)
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    async def _describe(self, request: Request) -> Response:
        await request.body()
        return await self._answer(request, {"question": "describe"})

    async def _ask(self, request: Request) -> Response:
        if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
            return JSONResponse({"error": "a question must be application/json"}, 415)
        body = b""
        try:
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:
                    return JSONResponse({"error": f"a question must have at most {MAX_BODY:,} bytes"}, 413)
        except ClientDisconnect:
            return Response(status_code=400)
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            return JSONResponse({"error": "a question must be valid JSON"}, 400)
        return await self._answer(request, message)

    async def _answer(self, request: Request, message: Any) -> Response:
        """Return the answer to a message; a waiting question is dropped if the page is closed."""
        future: Future[tuple[int, str]] = Future()
        self._questions.put((future, message))
        answer = asyncio.wrap_future(future)
        closed = asyncio.ensure_future(request.receive())  # the body was read, so that only a disconnection remains
        await asyncio.wait((answer, closed), return_when=asyncio.FIRST_COMPLETED)
        closed.cancel()
        if not answer.done():
            answer.cancel()
            return Response(status_code=400)
        status, text = answer.result()
        return Response(text, status, media_type="application/json")


class Guard:
    """ASGI middleware that rejects requests from other sites and other users, and adds headers to responses.

    Pages of other sites can send requests to this address (cross-site request forgery), also under a host name of
    their own (DNS rebinding), and other users of the machine can connect to it.

    Args:
        app: the application.
        token: the secret that a request must contain: the page in its query, other requests in the header X-Token.
        port: the port of the server.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self.app, self.token = app, token
        self.hosts = (f"{ADDRESS}:{port}", f"localhost:{port}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Content-Security-Policy", NO_CONTENT)
            await send(message)

        refusal = self._refusal(Request(scope))
        app = self.app if refusal is None else PlainTextResponse(refusal, 403)
        await app(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> str | None:
        """Return the reason to refuse a request; None if there is none."""
        host, origin = request.headers.get("Host"), request.headers.get("Origin")
        if host not in self.hosts:
            return f"Host must be {' or '.join(self.hosts)}"
        if origin not in (None, f"http://{host}"):
            return "Origin must be the page of this server"
        token = request.query_params.get("token") if request.scope["path"] == "/" else request.headers.get("X-Token")
        if not secrets.compare_digest((token or "").encode(), self.token.encode()):
            return "wrong token; open the address printed by lightning-tfm explore"
        return None


@contextmanager
def _opened(address: str) -> Iterator[None]:
    """Open an address in the browser, by a file that exists in the context and that other users cannot read.

    Other users can read the arguments of the browser's process, which must not contain the token.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "explore.html"
        refresh = f'<meta http-equiv="refresh" content="0; url={escape(address)}">'
        path.write_text(f"<!doctype html>\n<title>lightning-tfm explore</title>\n{refresh}\n", encoding="utf-8")
        Thread(target=webbrowser.open, args=(path.as_uri(),), daemon=True).start()  # some browsers block it
        yield

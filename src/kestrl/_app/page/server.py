"""The page as a server on this machine."""

from __future__ import annotations

import socket
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from kestrl._app.episodes.labels import delete_label, labelled, write_label
from kestrl._app.page.addresses import ASSETS
from kestrl._app.page.guard import Guard
from kestrl._app.page.library import Library
from kestrl._app.page.pages import Manner, PageNotFound, Pages
from kestrl._app.page.rendering import FILES, load, render
from kestrl.errors import KestrlError, PlaceError, StorageError, UserInputError

LOOPBACK = "127.0.0.1"
LABELS = frozenset({"yes", "no", "none"})
MOST_BYTES = 8_192
"""Maximum size of a form."""
LONGEST_NOTE = 1_000
SERVED = Manner(link=lambda address: address)


def page_app(library: Library, token: str, *, labels: bool) -> Guard:
    """The page as an ASGI application.

    Args:
        library: The runs.
        token: The token of the address that is printed.
        labels: Whether labels may be written.
    """
    pages = Pages(library, labels=labels)

    def show(request: Request) -> Response:
        try:
            return HTMLResponse(pages.page(_address(request), request.query_params, SERVED))
        except PageNotFound:
            return _problem("There is no such page.", 404)
        except (StorageError, UserInputError) as error:
            return _problem(str(error), 500)

    async def label(request: Request) -> Response:
        if not labels:
            return _problem("Labels are off: kestrl ui was started with --read-only, or may not write here.", 403)
        body = await _body(request)
        if body is None:
            return _problem(f"A form has at most {MOST_BYTES} bytes.", 413)
        return await run_in_threadpool(_labelled, pages, _address(request).removesuffix("/label"), body)

    def asset(request: Request) -> Response:
        return FileResponse(FILES / request.url.path.strip("/"))

    routes = [
        *(Route(f"/{name}", asset, methods=["GET"]) for name in ASSETS),
        Route("/{path:path}/label", label, methods=["POST"]),
        Route("/{path:path}", show, methods=["GET"]),
    ]
    return Guard(Starlette(routes=routes), token)


def _address(request: Request) -> str:
    """The path as it was sent, so that an encoded slash in a name is none."""
    raw: bytes = request.scope.get("raw_path") or request.url.path.encode()
    path = raw.decode("ascii", "replace").partition("?")[0]
    return path.rstrip("/") or "/"


async def _body(request: Request) -> bytes | None:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            return None
    return bytes(body)


def _labelled(pages: Pages, address: str, body: bytes) -> Response:
    form = {name: texts[-1] for name, texts in parse_qs(body.decode("utf-8", "replace")).items()}
    label, note = form.get("label", ""), form.get("note", "")
    if label not in LABELS or len(note) > LONGEST_NOTE:
        return _problem(f"A label is yes, no or none, and a note has at most {LONGEST_NOTE} characters.", 400)
    try:
        store, episode = pages.episode_at(address)
        if label == "none":
            delete_label(store, episode)
        else:
            write_label(store, labelled(episode, label, note))
    except PageNotFound:
        return _problem("There is no such episode.", 404)
    except PlaceError as error:
        return _problem(str(error), 403)
    except KestrlError as error:
        return _problem(str(error), 500)
    return RedirectResponse(address, 303)


def _problem(message: str, status: int) -> Response:
    return HTMLResponse(render("problem.html", manner=SERVED, message=message, live=False), status)


def listener(port: int) -> socket.socket:
    """A socket on the loopback; port 0 is a free one.

    Raises:
        UserInputError: The port is in use.
    """
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((LOOPBACK, port))
        listening.listen()  # a browser that is faster than the server waits
    except OSError as error:
        listening.close()
        raise UserInputError(f"--port: {LOOPBACK}:{port} cannot be used: {error.strerror}; name another") from error
    return listening


def serve(app: Guard, listening: socket.socket) -> None:
    """Serves until the process is interrupted. Nothing is logged: an address may hold the token."""
    load()  # while the address is opened: requests wait in the queue of the socket
    config = uvicorn.Config(
        app, access_log=False, log_level="warning", server_header=False, proxy_headers=False, lifespan="off"
    )
    uvicorn.Server(config).run(sockets=[listening])

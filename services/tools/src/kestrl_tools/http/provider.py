"""The endpoints of an HTTP server as a provider of tools."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from kestrl._shared.plan.settings.tools import HttpEntry, ToolEntry
from kestrl.errors import ToolFailure, UserInputError, text_of
from kestrl.tools.provider import Kwargs, ProviderSession, ToolDefinition, kwargs_failure
from kestrl_tools.http.client import HttpClient, Response
from kestrl_tools.http.credential import POLL_SECONDS, UNAUTHORIZED, AcceptedRequest
from kestrl_tools.http.document import MAX_BYTES, Document, DocumentInvalid, Unsupported, parsed
from kestrl_tools.http.egress import Egress, host_and_port, of_url
from kestrl_tools.http.operations import Operation, of_document, of_endpoint
from kestrl_tools.http.requests import HttpRequest, request_of
from kestrl_tools.http.results import result_of
from kestrl_tools.servers import LeftOut, ServerUnavailable, definitions, left_out_by, secret_header

DOCUMENT_SECONDS = 30.0
"""Time limit of reading a document by its URL."""


class HttpProvider:
    """A server whose endpoints are tools. An episode has cookies, and if wanted a session header, of its own."""

    environment, has_state, has_prompt = True, False, False

    def __init__(
        self, entry: ToolEntry, server: HttpEntry, folder: str | None, *, names: AbstractResolver | None = None
    ) -> None:
        """Describes it.

        Args:
            entry: The entry of the manifest.
            server: Its server.
            folder: Folder of the manifest, beside which the document is; None for the working directory.
            names: Resolver of host names; None for that of the system.
        """
        self.name = entry.name
        self._wanted, self._left_out = entry.tools, left_out_by(entry)
        self._server, self._folder, self._names = server, folder, names
        self._problem = ""
        self._base_url = ""
        self._operations: Mapping[str, Operation] = {}
        self._client = self._made_client(server.max_response_bytes)
        self._accepted = AcceptedRequest()

    async def list_tools(self) -> Sequence[ToolDefinition]:
        server = self._server
        headers = self.headers()
        selection, left_out = self._wanted, self._left_out
        if server.openapi is None:
            operations = [of_endpoint(endpoint) for endpoint in server.endpoints]
            self._base_url = _normal(server.base_url or "")
        else:
            document, first = await self._document(server.openapi)
            self._base_url = _normal(first)
            fixed = [*headers, *([server.session_header] if server.session_header else [])]
            operations = await asyncio.to_thread(of_document, self.name, document, selection, fixed, left_out)
            selection, left_out = None, LeftOut(unsupported=left_out.unsupported)  # both are applied to the document
        tools = [operation.listed() for operation in operations]
        offered = await asyncio.to_thread(definitions, "http", self.name, tools, selection, left_out)
        self._operations = {operation.name: operation for operation in operations}
        return offered

    def headers(self) -> Mapping[str, str]:
        """The headers of the manifest, with the present entries of secrets.

        Raises:
            UserInputError: There is no such entry.
        """
        server = self._server
        texts = {name: secret_header("http", text) for name, text in server.secret_headers.items()}
        return {**server.headers, **texts}

    def check(self, create_kwargs: Kwargs) -> None:
        if create_kwargs:
            raise kwargs_failure(self.name, "create_kwargs", "an HTTP server takes none")

    async def start(self) -> None:
        return None

    async def open(self, create_kwargs: Kwargs) -> ProviderSession:
        self.check(create_kwargs)
        header = self._server.session_header
        session_headers = {header: secrets.token_urlsafe(16)} if header else {}
        return _Session(self, self._client.session(), session_headers)

    def health(self) -> str:
        return self._problem

    async def stop(self) -> None:
        await self._client.close()

    async def call(
        self, session: aiohttp.ClientSession, tool: str, arguments: Kwargs, session_headers: Mapping[str, str]
    ) -> object:
        """Calls an operation in an episode's session, with headers of its own; raises as `ProviderSession.call` does.

        A credential that was accepted and is refused is waited for, as long as a call may take: a refused request was
        not executed, and the Secret may have the new one soon.
        """
        request = request_of(self._operations[tool], self._base_url, arguments)
        ending = asyncio.get_running_loop().time() + self._server.seconds
        while True:
            headers, plain = self.headers(), not len(session.cookie_jar)
            response = await self._asked(session, request, {**headers, **session_headers}, ending)
            self._accepted.note(request, response, plain=plain)
            refused = response.status == UNAUTHORIZED and response.authorized and bool(self._server.secret_headers)
            proof = partial(self._asked_alone, headers=headers, ending=ending)
            if not refused or (self.headers() == headers and not await self._accepted.is_refused(proof)):
                return result_of(tool, response)
            await self._changed(headers, ending)

    async def _asked(
        self, session: aiohttp.ClientSession, request: HttpRequest, headers: Mapping[str, str], ending: float
    ) -> Response:
        seconds = round(max(0.1, ending - asyncio.get_running_loop().time()), 1)
        try:
            response = await self._client.ask(session, request, headers, seconds=seconds)
        except ServerUnavailable as error:
            self._problem = str(error)
            raise
        self._problem = ""
        return response

    async def _asked_alone(self, request: HttpRequest, headers: Mapping[str, str], ending: float) -> Response:
        """The response to a request without anything of an episode."""
        async with self._client.session() as session:
            return await self._asked(session, request, headers, ending)

    async def _changed(self, headers: Mapping[str, str], ending: float) -> None:
        """Returns once there are other credentials.

        Raises:
            ToolFailure: There are none in time.
        """
        loop = asyncio.get_running_loop()
        while self.headers() == headers:
            if loop.time() + POLL_SECONDS > ending:
                self._problem = (
                    f"{self.name}: the server refuses the credential of http.secretHeaders, which it has accepted "
                    "before (401); put the new one into the Secret"
                )
                raise ToolFailure(self._problem, code="tool_unauthorized", retryable=True)
            await asyncio.sleep(POLL_SECONDS)

    def _made_client(self, max_bytes: int) -> HttpClient:
        server = self._server
        hosts = [of_url(URL(url)) for url in (server.base_url, server.openapi) if url and "://" in url]
        egress = Egress([*hosts, *map(host_and_port, server.allow_hosts)], server.private_networks)
        return HttpClient(self.name, egress, concurrency=server.concurrency, max_bytes=max_bytes, names=self._names)

    async def _document(self, place: str) -> tuple[Document, str]:
        """The document, and the URL before the paths of its operations."""
        try:
            content = await (self._fetched(URL(place)) if "://" in place else asyncio.to_thread(self._read, place))
            document = await asyncio.to_thread(parsed, content)
            return document, self._server.base_url or _first_server(document, place)
        except (DocumentInvalid, Unsupported, ServerUnavailable, ToolFailure, OSError) as error:
            raise UserInputError(f"http.openapi: {place}: {text_of(error)}") from error

    def _read(self, place: str) -> bytes:
        with (Path(self._folder or ".") / place).open("rb") as file:
            return file.read(MAX_BYTES + 1)

    async def _fetched(self, url: URL) -> bytes:
        """The document at a URL, with the headers of the manifest if it is on the server of the tools."""
        client = self._made_client(MAX_BYTES)
        base = self._server.base_url
        same_origin = base is None or URL(base).origin() == url.origin()
        headers = self.headers() if same_origin else dict[str, str]()
        request = HttpRequest(method="GET", url=url, headers={})
        try:
            async with client.session() as session:
                response = await client.ask(session, request, headers, seconds=DOCUMENT_SECONDS)
        finally:
            await client.close()
        if response.status != 200:
            raise DocumentInvalid(f"the server answers with {response.status} {response.reason}")
        if response.truncated:
            raise DocumentInvalid(f"it is longer than {MAX_BYTES} bytes")
        return response.body


class _Session:
    """An episode's use of the server."""

    prompt = ""

    def __init__(self, provider: HttpProvider, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self._provider, self._session, self._own = provider, session, headers

    async def call(self, tool: str, arguments: Kwargs, filled: Kwargs) -> object:
        return await self._provider.call(self._session, tool, {**arguments, **filled}, self._own)

    async def state(self) -> object:
        return None

    async def close(self) -> None:
        await self._session.close()


def _normal(url: str) -> str:
    return str(URL(url))


def _first_server(document: Document, place: str) -> str:
    """URL of the document's first server, which must be where the document is.

    Raises:
        UserInputError: It is somewhere else, or has variables.
    """
    servers = document.items(document.root.get("servers")) or [{}]
    text = str(document.at(servers[0]).get("url", "/"))
    origin = URL(place).origin()
    url = URL(place).join(URL(text)) if _is_url(text) else None
    if url is None or url.origin() != origin:
        raise UserInputError(
            f"http.baseUrl: is missing, and the document's server {text!r} is not at {origin}, from which it was read; "
            "give the URL before the paths"
        )
    return str(url)


def _is_url(text: str) -> bool:
    try:
        return "{" not in str(URL(text, encoded=True))
    except ValueError:
        return False

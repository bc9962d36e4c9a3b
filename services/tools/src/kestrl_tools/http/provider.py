"""The endpoints of an HTTP server as a provider of tools."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from kestrl._shared.plan.settings.tools import HttpEntry, ToolEntry
from kestrl.errors import ToolFailure, UserInputError, text_of
from kestrl.tools.provider import Kwargs, ProviderSession, ToolDefinition, kwargs_failure
from kestrl_tools.http.client import HttpClient
from kestrl_tools.http.document import MAX_BYTES, Document, DocumentInvalid, Unsupported, parsed
from kestrl_tools.http.egress import Egress, host_and_port, of_url
from kestrl_tools.http.operations import Operation, of_document, of_endpoint
from kestrl_tools.http.requests import Request, request_of
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

    async def list_tools(self) -> Sequence[ToolDefinition]:
        server = self._server
        headers = self.headers()
        wanted, left_out = self._wanted, self._left_out
        if server.openapi is None:
            found = [of_endpoint(endpoint) for endpoint in server.endpoints]
            self._base_url = _normal(server.base_url or "")
        else:
            document, first = await self._document(server.openapi)
            self._base_url = _normal(first)
            fixed = [*headers, *([server.session_header] if server.session_header else [])]
            found = await asyncio.to_thread(of_document, self.name, document, wanted, fixed, left_out)
            wanted, left_out = None, LeftOut(unsupported=left_out.unsupported)  # both are applied to the document
        tools = [operation.listed() for operation in found]
        listed = await asyncio.to_thread(definitions, "http", self.name, tools, wanted, left_out)
        self._operations = {operation.name: operation for operation in found}
        return listed

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
        own = {header: secrets.token_urlsafe(16)} if header else {}
        return _Session(self, self._client.session(), own)

    def health(self) -> str:
        return self._problem

    async def stop(self) -> None:
        await self._client.close()

    async def call(
        self, session: aiohttp.ClientSession, tool: str, arguments: Kwargs, headers: Mapping[str, str]
    ) -> object:
        """Calls an operation in an episode's session; raises as `ProviderSession.call` does."""
        request = request_of(self._operations[tool], self._base_url, arguments)
        try:
            response = await self._client.ask(session, request, headers, seconds=self._server.seconds)
        except ServerUnavailable as error:
            self._problem = str(error)
            raise
        self._problem = ""
        return result_of(tool, response)

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
        own = base is None or URL(base).origin() == url.origin()
        headers = self.headers() if own else dict[str, str]()
        request = Request(method="GET", url=url, headers={})
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

    def __init__(self, provider: HttpProvider, session: aiohttp.ClientSession, own: Mapping[str, str]) -> None:
        self._provider, self._session, self._own = provider, session, own

    async def call(self, tool: str, arguments: Kwargs, filled: Kwargs) -> object:
        headers = {**self._provider.headers(), **self._own}
        return await self._provider.call(self._session, tool, {**arguments, **filled}, headers)

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

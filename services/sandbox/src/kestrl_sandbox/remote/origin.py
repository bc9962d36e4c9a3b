"""Requests of web pages, which a browser sends to a loopback address for whatever page it shows."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

ORIGIN, HOST = "Origin", "Host"


def foreign_page(headers: Mapping[str, str], *, by_name: bool) -> str:
    """Why a request is refused as that of a web page elsewhere; empty if it is not one.

    Args:
        headers: Of the request.
        by_name: Whether the server may be asked by any name, since its requests show a token. Without one it answers at
            a loopback address alone, and a page may have had its own name resolved to that.
    """
    host, origin = headers.get(HOST, ""), headers.get(ORIGIN)
    if not by_name and not _is_loopback(host):
        return f"Host: {host[:80]!r} is no loopback address, and the server has no token"
    if origin is not None and _place(origin) != host.lower():
        return f"Origin: requests of pages of {origin[:80]!r} are not answered"
    return ""


def _place(origin: str) -> str | None:
    """Host and port of an origin; None for `null` and what is none."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return is_loopback(name)
    except ValueError:
        return False


def is_loopback(name: str) -> bool:
    """Whether a host is this machine: `localhost`, or an address of the loopback interface."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"

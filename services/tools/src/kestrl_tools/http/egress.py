"""Hosts and addresses that the tools of an HTTP server may call.

A host must be named by the manifest. Its name is resolved once for a connection, and the connection is made to an
address that was checked, so that a name that changes its address between the two has no effect.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from kestrl._shared.plan.servers import METADATA, is_cluster_name
from kestrl.errors import ToolFailure

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
METADATA_IPV6 = "fd00:ec2::254/128"
NO_HOST = ("0.0.0.0/8", "224.0.0.0/4", "240.0.0.0/4", "::/128", "fe80::/10", "ff00::/8")
NEVER = tuple(map(ip_network, (*METADATA, METADATA_IPV6, *NO_HOST)))
"""Networks that no tool reaches, whatever the manifest lists: metadata services of clouds, addresses of one link,
groups, and no address at all."""
EMBEDDING = tuple(map(ip_network, ("::ffff:0:0/96", "64:ff9b::/96")))
"""IPv6 networks whose last 32 bits are the IPv4 address that is reached: mapped (RFC 4291) and NAT64 (RFC 6052)."""
TUNNELS = tuple(map(ip_network, ("2002::/16", "2001::/32")))
"""IPv6 networks that lead to IPv4 addresses in other ways: 6to4 and Teredo. Treated as private."""


class EgressDenied(ToolFailure):
    """A request would leave the hosts and addresses that the manifest allows."""

    code = "tool_egress_denied"


def host_and_port(text: str) -> tuple[str, int]:
    """An entry of `allowHosts`; the port is 443 by default."""
    url = URL(f"https://{text}")
    return _folded(url.host or ""), url.port or 443


def of_url(url: URL) -> tuple[str, int]:
    """Host and port of a URL."""
    return _folded(url.host or ""), url.port or 0


class Egress:
    """Decides whether a URL may be requested, and which of a host's addresses may be connected to."""

    def __init__(self, hosts: Iterable[tuple[str, int]], private: Iterable[str]) -> None:
        """Keeps what the manifest allows.

        Args:
            hosts: Hosts with ports.
            private: Networks in which addresses of hosts may be although they are not public.
        """
        self._hosts = frozenset(hosts)
        self._private = tuple(map(ip_network, private))

    def check(self, url: URL) -> None:
        """Checks a URL before it is requested.

        Raises:
            EgressDenied: Its host or port is not one of the manifest's, or its address is never reached.
        """
        host, port = of_url(url)
        if url.scheme not in ("http", "https") or (host, port) not in self._hosts:
            raise EgressDenied(
                f"a request to {url.scheme}://{host}:{port} is refused: the manifest does not allow that host and "
                "port; if the server may redirect there, add it to http.allowHosts"
            )
        literal = _address(host)
        if literal is not None and _within(literal, NEVER):
            raise EgressDenied(f"a request to {host} is refused: it is an address that no tool may reach")

    def allows(self, host: str, address: str) -> bool:
        """Whether a connection to an address that the host's name has may be made."""
        ip = _address(address)
        if ip is None or _within(ip, NEVER):
            return False
        local = is_cluster_name(host)  # names that are private by their form, so that the manifest lists them as such
        return local or _is_public(ip) or _within(ip, self._private)


class CheckedResolver(AbstractResolver):
    """Resolves names to the addresses that may be connected to."""

    def __init__(self, egress: Egress, names: AbstractResolver) -> None:
        """Wraps a resolver of names, which it closes."""
        self._egress, self._names = egress, names

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Addresses of a host.

        Raises:
            EgressDenied: It has none that may be connected to.
            OSError: It cannot be resolved.
        """
        resolved = await self._names.resolve(host, port, family)
        allowed = [item for item in resolved if self._egress.allows(host, item["host"])]
        if resolved and not allowed:
            addresses = ", ".join(sorted({item["host"] for item in resolved}))
            raise EgressDenied(
                f"a request to {host} is refused: it has the address {addresses}, which is not public; if that is "
                "intended, add its network to http.privateNetworks"
            )
        return allowed

    async def close(self) -> None:
        await self._names.close()


def _folded(host: str) -> str:
    return host.lower().rstrip(".")


def _address(text: str) -> Address | None:
    try:
        ip = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if ip.version == 6 and _within(ip, EMBEDDING):
        return IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip


def _within(address: Address, networks: Sequence[Network]) -> bool:
    return any(address in network for network in networks)


def _is_public(address: Address) -> bool:
    return address.is_global and not address.is_multicast and not _within(address, TUNNELS)

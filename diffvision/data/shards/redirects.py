"""An HTTP client that refuses redirects to other schemes, and from the internet to the local network.

Otherwise a server of the internet could make this machine request anything from its neighbours, or from itself. What
the user names is not restricted, and servers of the local network may redirect within it. The address that is
connected to decides, whatever a name resolves to.
"""

import ipaddress
import socket
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from aiohttp import ClientSession, TCPConnector, TraceConfig, TraceRequestRedirectParams, TraceRequestStartParams
from yarl import URL

_SPECIAL = [ipaddress.IPv6Network(net) for net in ("64:ff9b:1::/48", "::/96", "::ffff:0:0:0/96")]  # local, obsolete
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # IPv4 addresses in the last 32 bits


class RefusedRedirect(PermissionError):
    """A redirect that is not followed."""


@dataclass
class _Journey:
    """One request with its redirects."""

    was_public: bool = False  # a server with a public address was connected to
    redirect: str = ""  # the one that is being followed


_JOURNEY: ContextVar[_Journey] = ContextVar("journey")


async def client(**settings: Any) -> ClientSession:
    """Return a session, as fsspec's `get_client`."""
    trace = TraceConfig()
    trace.on_request_start.append(_start)
    trace.on_request_redirect.append(_redirect)
    # No connection is used twice: one that the user's request opened would not be checked again.
    connector = TCPConnector(socket_factory=_socket, force_close=True)
    return ClientSession(connector=connector, trace_configs=[trace], **settings)


async def _start(session: ClientSession, context: SimpleNamespace, params: TraceRequestStartParams) -> None:
    _JOURNEY.set(_Journey())


async def _redirect(session: ClientSession, context: SimpleNamespace, params: TraceRequestRedirectParams) -> None:
    """Refuse a redirect to another protocol, and to http from https."""
    location = params.response.headers.get("Location") or params.response.headers.get("URI") or ""
    try:
        scheme = params.url.join(URL(location)).scheme
    except ValueError:
        scheme = ""
    if scheme not in ("http", "https") or (params.url.scheme, scheme) == ("https", "http"):
        params.response.close()
        raise RefusedRedirect(
            f"{params.url} redirects to {location!r}: only http and https are followed, not to http from https"
        )
    _JOURNEY.get().redirect = f"{params.url} redirects to {location!r}"


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket for an address of `getaddrinfo`, unless a redirect leads there from the internet."""
    family, kind, protocol, _, endpoint = address
    journey, public = _JOURNEY.get(), is_public(endpoint[0])
    if journey.redirect and journey.was_public and not public:
        # Without the address: where a name has several, aiohttp raises the error itself only if all are alike.
        raise RefusedRedirect(
            f"{journey.redirect}, on this machine or its network: a server of the internet is not followed there; give "
            "that URL itself if it is meant"
        )
    journey.was_public |= public
    return socket.socket(family, kind, protocol)


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the internet: not of this machine, its network or a special purpose."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.is_site_local or any(ip in network for network in _SPECIAL):
            return False
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        ip = inner or ip
    return ip.is_global and not ip.is_multicast

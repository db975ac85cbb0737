"""Who is at the other end of a UCX endpoint, which ucxx does not tell: one call into the library it has loaded.

ucxx's listener takes a port and no address, so it listens on every interface. An agent that is meant for its
own machine turns others away as they come in.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket

_FIELD_REMOTE_SOCKADDR = 1 << 2  # enum ucp_ep_attr_field
_SOCKADDR_STORAGE_BYTES = 128


class _EpAttr(ctypes.Structure):
    """The head of ucp_ep_attr_t; fields that are not asked for are not written."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local", ctypes.c_ubyte * _SOCKADDR_STORAGE_BYTES),
        ("remote", ctypes.c_ubyte * _SOCKADDR_STORAGE_BYTES),
        ("unused", ctypes.c_ubyte * 256),
    )


def remote_ip(endpoint_handle: int) -> str | None:
    """The peer's IP address, or None if UCX cannot tell."""
    attr = _EpAttr(field_mask=_FIELD_REMOTE_SOCKADDR)
    query = ctypes.CDLL("libucp.so.0").ucp_ep_query
    query.restype = ctypes.c_int8  # ucs_status_t is a packed enum
    if query(ctypes.c_void_p(endpoint_handle), ctypes.byref(attr)) != 0:
        return None
    return _ip(bytes(attr.remote))


def is_loopback(ip: str | None) -> bool:
    return ip is not None and ipaddress.ip_address(ip).is_loopback


def _ip(sockaddr: bytes) -> str | None:
    """From a struct sockaddr_storage."""
    family = int.from_bytes(sockaddr[:2], "little")
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, sockaddr[4:8])
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, sockaddr[8:24])
    return None

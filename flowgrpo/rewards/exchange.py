"""One request of a reward's client, whose answer neither takes for ever nor fills the memory."""

from __future__ import annotations

import time
from typing import Any


def exchange(http: Any, method: str, url: str, body: bytes | None, timeout: float, longest: int, unpacked: bool
             ) -> tuple[int, Any, bytes]:
    """Status, headers and body of one answer.

    http: an httpx.Client; timeout: seconds until the whole answer is there, which httpx counts per piece; longest: of
    the body, in bytes; unpacked: whether a compressed body is unpacked, and counted so. ValueError for a longer body,
    httpx.ReadTimeout for a later one, and what httpx raises.
    """
    import httpx

    until, told = time.monotonic() + timeout, bytearray()
    with http.stream(method, url, content=body) as response:
        for some in response.iter_bytes() if unpacked else response.iter_raw():
            told += some
            if len(told) > longest:
                raise ValueError(f"it sent more than {longest} bytes")
            if time.monotonic() > until:
                raise httpx.ReadTimeout("")
    return response.status_code, response.headers, bytes(told)

"""A large answer: its ETag is a digest of exactly the bytes that are sent, so that a reader who has them gets 304; and
it is compressed for those who say that they can read that.

The tag is strong: another coding of the same content has another tag.
"""

import asyncio
import gzip
import hashlib
import re
from typing import Final

from fastapi import Request, Response

SMALLEST_COMPRESSED: Final = 1024
"""Bytes below which compression gains nothing."""

LEVEL: Final = 4
_TAG: Final = re.compile(r'(?:W/)?("[\x21\x23-\x7e]*")')


async def represent(request: Request, body: bytes, media_type: str = "application/json") -> Response:
    """Return a GET's answer: 304 if the caller has these bytes, else the bytes, compressed if it takes gzip.

    Args:
        request: whose Accept-Encoding and If-None-Match are obeyed.
        body: the content.
        media_type: what it is.
    """
    coded = len(body) >= SMALLEST_COMPRESSED and _takes_gzip(request.headers.get("accept-encoding", ""))
    digest = hashlib.blake2b(body, digest_size=16).hexdigest()
    tag = f'"{digest}-gzip"' if coded else f'"{digest}"'
    headers = {"etag": tag, "cache-control": "private, no-cache", "vary": "accept-encoding, authorization"}
    if _has(request.headers.get("if-none-match"), tag):
        return Response(status_code=304, headers=headers)
    if coded:
        body = await asyncio.to_thread(gzip.compress, body, LEVEL, mtime=0)
        headers["content-encoding"] = "gzip"
    return Response(body, media_type=media_type, headers=headers)


def _has(header: str | None, tag: str) -> bool:
    return header is not None and (header.strip() == "*" or tag in _TAG.findall(header))


def _takes_gzip(header: str) -> bool:
    """Tell whether Accept-Encoding names gzip, or everything, and doesn't weigh it 0."""
    weights = {}
    for part in header.lower().split(","):
        name, _, weight = part.replace(" ", "").partition(";q=")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            return False
    return weights.get("gzip", weights.get("*", 0.0)) > 0

"""RFC 9457 problem details: the only shape in which a 4xx or 5xx leaves a service.

`code` is for programs and stable; `detail` is for people. Internals never reach either.
"""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import Response

MEDIA_TYPE = "application/problem+json"


class Problem(Response):
    """A problem response.

    Args:
        status: HTTP status.
        code: stable code for programs.
        detail: a sentence for people.
        errors: for invalid input, one entry per place: `{"location", "message"}`.
        headers: additional response headers.
    """

    media_type = MEDIA_TYPE

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        errors: Sequence[Mapping[str, Any]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        body: dict[str, Any] = {
            "type": f"urn:pin:problem:{code}",
            "title": HTTPStatus(status).phrase,
            "status": status,
            "code": code,
            "detail": detail,
        }
        if errors:
            body["errors"] = list(errors)
        super().__init__(orjson.dumps(body), status_code=status, headers=dict(headers or {}))

"""RFC 9457 problem details: the only shape in which a 4xx or 5xx leaves a service.

`code` is for programs and stable; `detail` is for people. Internals never reach either. Every code is in one list:
CODES and the errors that a service declares; contracts/openapi/errors.md is generated from them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import orjson
from fastapi import Response

MEDIA_TYPE: Final = "application/problem+json"


@dataclass(frozen=True, slots=True)
class Code:
    """What a problem code says.

    Attributes:
        status: the HTTP status that it comes with; None: the one of the refusal that it passes on.
        meaning: a sentence for those who write a client.
    """

    status: int | None
    meaning: str


CODES: Final[Mapping[str, Code]] = {
    "malformed_request": Code(400, "The request or its body can't be read."),
    "malformed_json": Code(400, "The body is not JSON."),
    "idempotency_key_not_supported": Code(400, "This route keeps no answers; send no Idempotency-Key."),
    "cors_refused": Code(400, "Pages of this web origin may not call the API."),
    "unauthenticated": Code(401, "There is no access token, or it is not valid."),
    "forbidden": Code(403, "The access token lacks the scope or role that the route needs."),
    "not_found": Code(404, "There is no such path."),
    "method_not_allowed": Code(405, "The path has no such method; see the header Allow."),
    "request_in_progress": Code(409, "A request with this Idempotency-Key is being handled; ask again."),
    "precondition_failed": Code(412, "The entity is not at the version that If-Match names; read it again."),
    "body_too_large": Code(413, "The body is larger than the limit."),
    "validation_error": Code(422, "The request is not valid; `errors` names the places."),
    "value_not_storable": Code(422, "The request holds a value that can't be stored."),
    "idempotency_key_reused": Code(422, "The Idempotency-Key was used for another request."),
    "rate_limited": Code(429, "Too many requests of this principal; wait as long as Retry-After says."),
    "internal_error": Code(500, "The request failed; nothing was changed."),
    "unavailable": Code(503, "The service can't reach its database; try again."),
    "issuer_unavailable": Code(503, "The keys of the token's issuer can't be fetched; try again."),
    "not_live": Code(503, "A part of the process makes no progress."),
    "not_ready": Code(503, "The service can't serve yet."),
    "http_error": Code(None, "The request was refused; the status tells why."),
}
"""Codes that every service may answer with."""


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """How a domain error is answered: HTTP status and problem code; its meaning is the error's docstring."""

    status: int
    code: str


def codes_of(errors: Mapping[type[Exception], ErrorAnswer]) -> dict[str, Code]:
    """Return every code of a service: those of all services, and those of its own errors.

    Raises:
        ValueError: one code would have two statuses.
    """
    codes = dict(CODES)
    for error, answer in errors.items():
        known = codes.get(answer.code)
        if known is not None and known.status != answer.status:
            raise ValueError(f"code {answer.code} has the statuses {known.status} and {answer.status}")
        if known is None:
            codes[answer.code] = Code(answer.status, (error.__doc__ or "").strip().splitlines()[0])
    return codes


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

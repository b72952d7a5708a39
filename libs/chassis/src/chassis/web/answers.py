"""How every error is answered: with a problem document that tells what the caller can do, and nothing of the inside."""

from collections.abc import Callable, Mapping
from math import floor
from typing import Final

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from chassis.db import DATABASE_ERRORS, is_bad_value, is_infrastructure
from chassis.idempotency import KeyReused, RequestInProgress
from chassis.identity import Forbidden, IssuerUnavailable, Unauthenticated
from chassis.preconditions import PreconditionFailed
from chassis.problems import ErrorAnswer, Problem
from chassis.web.sizes import MAX_BODY_BYTES

MOST_ERRORS: Final = 50
"""How many places of an invalid request are named: one of a megabyte can be wrong in a hundred thousand."""
MOST_PLACES: Final = 200
"""How many places a domain error may name: the faulty lines of a file are put right together."""

log = structlog.get_logger(__name__)


class BodyTooLarge(Exception):
    """The request body is larger than the limit."""


class KeyNotSupported(Exception):
    """The route keeps no answers under an Idempotency-Key."""


class InputRefused(Exception):
    """A part of the request is not valid.

    Args:
        location: where it is: `query.after`.
        message: what is wrong with it.
    """

    def __init__(self, location: str, message: str) -> None:
        super().__init__(message)
        self.location = location


class RateLimited(Exception):
    """The principal has sent too many requests.

    Args:
        seconds: after which the next one may come.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__("too many requests")
        self.seconds = seconds


def install_error_handlers(app: FastAPI, errors: Mapping[type[Exception], ErrorAnswer]) -> None:
    """Give an application the answers to domain errors and to everything that chassis raises.

    What a domain error has in `places` is shown as the problem's `errors`.
    """
    fixed: dict[type[Exception], Callable[[Request, Exception], Response]] = {
        RequestValidationError: _invalid,
        HTTPException: _http_error,
        Unauthenticated: _unauthenticated,
        Forbidden: _forbidden,
        IssuerUnavailable: _issuer_unavailable,
        BodyTooLarge: _too_large,
        ClientDisconnect: _gone,
        InputRefused: _input_refused,
        KeyNotSupported: _key_not_supported,
        KeyReused: _key_reused,
        RequestInProgress: _in_progress,
        PreconditionFailed: _precondition_failed,
        RateLimited: _rate_limited,
    }
    for error_class, answer in errors.items():
        app.add_exception_handler(error_class, _domain_handler(answer))
    for error_class, handler in fixed.items():
        app.add_exception_handler(error_class, handler)
    for trouble in DATABASE_ERRORS:
        app.add_exception_handler(trouble, _database_error)


def _domain_handler(answer: ErrorAnswer) -> Callable[[Request, Exception], Response]:
    def handle(_: Request, error: Exception) -> Response:
        return Problem(answer.status, answer.code, str(error), errors=getattr(error, "places", ())[:MOST_PLACES])

    return handle


def _invalid(_: Request, error: Exception) -> Response:
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    if any(problem["type"] == "json_invalid" for problem in problems):
        return Problem(400, "malformed_json", "the request body is not JSON")
    entries = [
        {
            "location": ".".join(str(part) for part in problem["loc"]),
            "message": problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, "),
        }
        for problem in problems[:MOST_ERRORS]
    ]
    return Problem(422, "validation_error", "the request is not valid", errors=entries)


def _input_refused(_: Request, error: Exception) -> Response:
    entry = {"location": getattr(error, "location", ""), "message": str(error)}
    return Problem(422, "validation_error", "the request is not valid", errors=[entry])


def _http_error(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = getattr(error, "headers", None)
    if isinstance(error.__cause__, BodyTooLarge) or isinstance(error.__context__, BodyTooLarge):
        return _too_large(_, error)
    if status == 400:
        return Problem(400, "malformed_request", "the request body can't be read")
    if status == 404:
        return Problem(404, "not_found", "no such resource", headers=headers)
    if status == 405:
        return Problem(405, "method_not_allowed", "the method is not allowed here", headers=headers)
    return Problem(status, "http_error", str(getattr(error, "detail", "")), headers=headers)


def _unauthenticated(_: Request, error: Exception) -> Response:
    return Problem(401, "unauthenticated", str(error), headers={"www-authenticate": "Bearer"})


def _forbidden(_: Request, error: Exception) -> Response:
    return Problem(403, "forbidden", str(error))


def _issuer_unavailable(_: Request, error: Exception) -> Response:
    return Problem(503, "issuer_unavailable", str(error), headers={"retry-after": "5"})


def _too_large(_: Request, __: Exception) -> Response:
    return Problem(413, "body_too_large", f"the request body is larger than {MAX_BODY_BYTES} bytes")


def _gone(_: Request, __: Exception) -> Response:
    """Nobody reads this answer; the access log does."""
    return Problem(400, "malformed_request", "the request body did not come whole")


def _key_not_supported(_: Request, __: Exception) -> Response:
    return Problem(400, "idempotency_key_not_supported", "this route keeps no answers under an Idempotency-Key")


def _key_reused(_: Request, error: Exception) -> Response:
    return Problem(422, "idempotency_key_reused", str(error))


def _in_progress(_: Request, error: Exception) -> Response:
    return Problem(409, "request_in_progress", str(error), headers={"retry-after": "1"})


def _precondition_failed(_: Request, error: Exception) -> Response:
    return Problem(412, "precondition_failed", str(error))


def _rate_limited(_: Request, error: Exception) -> Response:
    seconds = floor(getattr(error, "seconds", 0)) + 1
    return Problem(429, "rate_limited", "too many requests", headers={"retry-after": str(seconds)})


def _database_error(request: Request, error: Exception) -> Response:
    if is_infrastructure(error):
        log.error("database unavailable", error=str(error)[:300])
        return Problem(503, "unavailable", "the service can't reach its database", headers={"retry-after": "5"})
    if is_bad_value(error):
        log.error("value not storable", error=str(error)[:300])
        return Problem(422, "value_not_storable", "the request holds a value that can't be stored; nothing was changed")
    return unexpected(request, error)


def unexpected(_: Request, error: Exception) -> Response:
    """Log what nobody expected and answer without a word about it."""
    log.error("request failed", exc_info=error)
    return Problem(500, "internal_error", "the request could not be handled; nothing was changed")

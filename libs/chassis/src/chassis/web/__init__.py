"""The HTTP application of a service: every error is a problem document, every request has a correlation id and a limit.

Middleware is plain ASGI. A route opens its write session with `Depends(..., scope="function")`, so that the commit
comes before the response and a failed commit is never answered with success.
"""

from chassis.problems import ErrorAnswer
from chassis.web.answers import MOST_ERRORS, InputRefused
from chassis.web.application import create_app
from chassis.web.bodies import Body, Instant, Reason, StorableObject, StorableText
from chassis.web.calls import PLATFORM_ADMIN, Call, operating, principal_with, reading, writing
from chassis.web.envelope import CORRELATION_HEADER, MAX_BODY_BYTES, BodyTooLarge, RequestEnvelope
from chassis.web.operations import Check
from chassis.web.pages import Keyset, Page
from chassis.web.routes import IfMatch, Router, declared_role, declared_scope

__all__ = [
    "CORRELATION_HEADER",
    "MAX_BODY_BYTES",
    "MOST_ERRORS",
    "PLATFORM_ADMIN",
    "Body",
    "BodyTooLarge",
    "Call",
    "Check",
    "ErrorAnswer",
    "IfMatch",
    "InputRefused",
    "Instant",
    "Keyset",
    "Page",
    "Reason",
    "RequestEnvelope",
    "Router",
    "StorableObject",
    "StorableText",
    "create_app",
    "declared_role",
    "declared_scope",
    "operating",
    "principal_with",
    "reading",
    "writing",
]

"""Which web origins' pages may call the API: those of a list, without cookies; a refusal is a problem document."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from chassis.problems import Problem


class CrossOrigin(CORSMiddleware):
    """Answers preflights, and lets the pages of some origins read what a service answers.

    Args:
        app: the application around which it stands.
        origins: `https://host[:port]`, each written out.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST", "PUT", "PATCH", "DELETE"),
            allow_headers=(
                "authorization", "content-type", "idempotency-key", "if-match", "if-none-match", "last-event-id",
                "x-request-id",
            ),
            expose_headers=(
                "etag", "idempotency-replayed", "location", "ratelimit-limit", "ratelimit-remaining",
                "ratelimit-reset", "retry-after", "x-request-id",
            ),
            allow_credentials=False,
            max_age=600,
        )  # fmt: skip

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answer a browser's question before it sends the request itself."""
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        kept = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        return Problem(400, "cors_refused", "pages of this origin may not send such a request", headers=kept)

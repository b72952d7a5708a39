"""What every route of chessboard shares: scopes, the role for acts, answers to domain errors, who gives a command."""

from typing import Final

from chassis.live import StreamUnavailable, TooManyStreams
from chassis.problems import ErrorAnswer
from chassis.web import Call
from chessboard.commands import By
from chessboard.domain import (
    BuildingNameTaken,
    BuildingNotFound,
    HoldMismatch,
    ImportRefused,
    NumberTaken,
    ProjectNotFound,
    PropertyObjectNotFound,
    StatusTransitionRefused,
    ValidationError,
    VersionConflict,
)

READ: Final = "chessboard:objects:read"
WRITE: Final = "chessboard:objects:write"
SALES_ADMIN: Final = "SALES_ADMIN"
"""The tenant's role for what people do to the chessboard by hand."""

ERRORS: Final[dict[type[Exception], ErrorAnswer]] = {
    ValidationError: ErrorAnswer(422, "validation_error"),
    ImportRefused: ErrorAnswer(422, "import_refused"),
    ProjectNotFound: ErrorAnswer(404, "project_not_found"),
    BuildingNotFound: ErrorAnswer(404, "building_not_found"),
    PropertyObjectNotFound: ErrorAnswer(404, "property_object_not_found"),
    BuildingNameTaken: ErrorAnswer(409, "building_name_taken"),
    NumberTaken: ErrorAnswer(409, "number_taken"),
    StatusTransitionRefused: ErrorAnswer(409, "status_transition_refused"),
    HoldMismatch: ErrorAnswer(409, "CHESSBOARD_PROPERTY_OBJECT_HOLD_MISMATCH"),
    VersionConflict: ErrorAnswer(409, "version_conflict"),
    TooManyStreams: ErrorAnswer(429, "too_many_streams"),
    StreamUnavailable: ErrorAnswer(503, "stream_unavailable"),
}


async def by(call: Call) -> By:
    """Return who gives a command, and when."""
    principal = call.principal
    return By(principal.tenant_id, principal.subject, await call.now(), call.correlation_id)

"""What only chessboard can be told by its environment."""

from datetime import timedelta

from pydantic import Field

from chassis.settings import ServiceSettings


class ChessboardSettings(ServiceSettings):
    """Settings of chessboard (see `chassis.settings` for the common ones).

    Attributes:
        hold_grace: time after a hold's own in which its release is left to CRM (seconds, or ISO 8601 such as PT10M).
    """

    http_port: int = Field(default=8102, ge=0, le=65535)
    hold_grace: timedelta = Field(default=timedelta(minutes=10), ge=timedelta(0), le=timedelta(days=7))

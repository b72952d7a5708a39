"""What only chessboard can be told by its environment."""

from pydantic import Field

from chassis.settings import ServiceSettings


class ChessboardSettings(ServiceSettings):
    """Settings of chessboard (see `chassis.settings` for the common ones)."""

    http_port: int = Field(default=8102, ge=0, le=65535)

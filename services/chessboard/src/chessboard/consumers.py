"""What chessboard consumes: each message is translated and becomes a command."""

from chassis.consumers import Consumer


def declare_consumers() -> list[Consumer]:
    """Return chessboard's consumers."""
    return []

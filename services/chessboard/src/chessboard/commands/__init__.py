"""The use cases that change something: one function each, called by HTTP routes, consumers and jobs alike.

A command locks the objects that it changes, calls the domain, and writes through `repository.write_changes`.
"""

from chessboard.commands.objects import By, hide_object, reprice_object, sell_object, unhide_object
from chessboard.commands.requests import settle_request

__all__ = ["By", "hide_object", "reprice_object", "sell_object", "settle_request", "unhide_object"]

"""Command line of chessboard: `python -m chessboard VERB`, or `chessboard VERB`."""

import sys

import chessboard
from chassis.cli import ServiceCommand
from chessboard.app import build
from chessboard.settings import ChessboardSettings
from chessboard.tables import SCHEMA


def main() -> int:
    """Run one verb and return the exit status."""
    return ServiceCommand(
        name="chessboard", settings=ChessboardSettings, build=build, package_file=chessboard.__file__, schema=SCHEMA
    ).main()


if __name__ == "__main__":
    sys.exit(main())

"""Command line of crm: `python -m crm VERB`, or `crm VERB`."""

import sys

import crm
from chassis.cli import ServiceCommand
from crm.app import build
from crm.settings import CrmSettings
from crm.tables import SCHEMA


def main() -> int:
    """Run one verb and return the exit status."""
    return ServiceCommand(
        name="crm", settings=CrmSettings, build=build, package_file=crm.__file__, schema=SCHEMA
    ).main()


if __name__ == "__main__":
    sys.exit(main())

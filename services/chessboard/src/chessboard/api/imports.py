"""The route of the import: a file of objects, judged line by line."""

from typing import Annotated
from uuid import UUID

from fastapi import Body as RequestBody
from fastapi import Query

from chassis.web import Body, Call, Router, writing
from chessboard import commands
from chessboard.api.errors import SALES_ADMIN, WRITE, by
from chessboard.api.objects import Currency
from chessboard.domain import read_sheet

MOST_ERRORS_SHOWN = 200


class ImportFault(Body):
    """A place of the file that is not valid; line 1 is the header, line 0 the file as a whole."""

    line: int
    column: str | None
    code: str
    message: str


class ImportReportView(Body):
    """What became of a file.

    `kept` counts lines whose price or status was not taken over, since the object is held or sold; `errors` holds the
    first 200 of `errorCount`.
    """

    applied: bool
    lines: int
    created: int
    changed: int
    unchanged: int
    kept: int
    error_count: int
    errors: list[ImportFault]


router = Router(prefix="/v1/projects", tags=["import"])


@router.post("/{project_id}/imports")
async def import_objects(
    project_id: UUID,
    call: Annotated[Call, writing(WRITE, SALES_ADMIN)],
    content: Annotated[bytes, RequestBody(media_type="text/csv")] = b"",
    currency: Annotated[Currency | None, Query()] = None,
    dry_run: Annotated[bool, Query(alias="dryRun")] = False,
    valid_only: Annotated[bool, Query(alias="validOnly")] = False,
) -> ImportReportView:
    """Bring the objects of a project to what a CSV file says: UTF-8, separated by `;` or `,`, 10000 lines at most.

    Columns, in any order: building (its name), section, number, floor, rooms, area, price; optional: currency, status
    (Free or Hidden). `currency` counts where the file has none. One faulty line refuses the whole file, unless
    `validOnly` leaves such lines out; `dryRun` writes nothing.
    """
    sheet = read_sheet(content, currency)
    report = await commands.import_objects(
        call.session, project_id, sheet, await by(call), dry_run=dry_run, valid_only=valid_only
    )
    return ImportReportView(
        applied=report.applied,
        lines=report.lines,
        created=report.created,
        changed=report.changed,
        unchanged=report.unchanged,
        kept=report.kept,
        error_count=len(report.errors),
        errors=[
            ImportFault(line=one.line, column=one.column, code=one.code, message=one.message)
            for one in report.errors[:MOST_ERRORS_SHOWN]
        ],
    )

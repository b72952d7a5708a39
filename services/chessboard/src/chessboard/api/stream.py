"""The route of the live stream: changes of status of a project's objects, as they happen."""

from typing import Annotated
from uuid import UUID

import orjson
from fastapi import Header, Request

from chassis.live import LiveEvent, LiveTail
from chassis.messaging import Received
from chassis.web import Call, EventStream, Router, reading
from chessboard import messages, queries
from chessboard.api.errors import READ

router = Router(prefix="/v1/projects", tags=["stream"])


def read_change(record: Received) -> LiveEvent | None:
    """Return a record of the service's own topic as watchers of its project see it.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: it is in breach of its contract.
    """
    kind = next((value for name, value in record.headers if name == "ce_type"), None)
    if kind != messages.STATUS_CHANGED.type.encode() or record.value is None:
        return None
    change = messages.read_change(orjson.loads(record.value))
    return LiveEvent((change.tenant_id, change.project_id), "status-changed", orjson.dumps(change.shown))


@router.get("/{project_id}/stream", status_code=200, response_class=EventStream)
async def watch_project(
    request: Request,
    project_id: UUID,
    call: Annotated[Call, reading(READ)],
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", max_length=2048)] = None,
) -> EventStream:
    """Stream the changes of status of a project's objects as server-sent events.

    `event: status-changed` has the object's new state and version. `event: resync` says that events may be missing:
    read the grid again, and go on. Open the stream first and read the grid then; an event whose version the grid has
    already is old. A comment comes every 15 seconds. The stream ends when the token expires: open another one with
    Last-Event-ID.
    """
    await queries.get_project(call.session, project_id)
    live: LiveTail = request.app.state.live
    principal = call.principal
    owner, audience = (principal.tenant_id, principal.subject), (principal.tenant_id, project_id)
    live.check(owner)
    return EventStream(lambda: live.watching(owner, audience, last_event_id), principal)

"""Jobs for the person on call: what runs, what ran, pause, resume, run now.

Orders are rows (`chassis.job_records`), so it does not matter which process answers: every driver of the service obeys
them. What changes something is audited in the same transaction with who did it. The routes are for the role
platform-admin and stand in no published OpenAPI document: jobs have no public API.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Final
from uuid import UUID, uuid5

from pydantic import Field

from chassis.audit import Audit, AuditRecord
from chassis.ids import EVENTS_NAMESPACE
from chassis.job_records import JobRecords
from chassis.jobs import DailyAt, Job
from chassis.web import Body, Call, ErrorAnswer, Reason, Router, operating


class JobNotFound(Exception):
    """The service has no job of this name."""


class JobPaused(Exception):
    """The job is paused; it has to be resumed before it can be run."""


ERRORS: Final[dict[type[Exception], ErrorAnswer]] = {
    JobNotFound: ErrorAnswer(404, "job_not_found"),
    JobPaused: ErrorAnswer(409, "job_paused"),
}


class PauseOrder(Body):
    """Body of a pause: why, for whoever finds the job paused."""

    reason: Reason


class RunView(Body):
    """A run as it was recorded; `result` is null while it runs."""

    id: UUID
    trigger: str
    started_at: datetime
    finished_at: datetime | None
    result: str | None
    counts: dict[str, int]
    error: str | None
    process: str


class PauseView(Body):
    """Since when a job is paused, by whom and why."""

    at: datetime
    by: str
    reason: str | None


class JobView(Body):
    """A job: its schedule, its last run, what comes next."""

    name: str
    schedule: str
    misfire: str
    running: bool
    last_run: RunView | None
    next_run_at: datetime | None = Field(description="null while the job is paused")
    run_requested_at: datetime | None
    paused: PauseView | None


class JobList(Body):
    """All jobs of a service."""

    items: list[JobView]


def router(service: str, schema: str, jobs: Sequence[Job]) -> Router:
    """Return the routes under /v1/admin/jobs.

    Args:
        service: first part of the scopes `<service>:jobs:read` and `<service>:jobs:operate`.
        schema: the service's schema.
        jobs: the jobs that the service declares.
    """
    routes = Router(prefix="/v1/admin/jobs", tags=["jobs"], include_in_schema=False)
    desk = _Desk(schema, jobs)
    read, operate = f"{service}:jobs:read", f"{service}:jobs:operate"

    @routes.get("")
    async def list_jobs(call: Annotated[Call, operating(read)]) -> JobList:
        """List the service's jobs."""
        return JobList(items=await desk.views(call, list(desk.jobs)))

    @routes.post("/{name}/pause")
    async def pause_job(name: str, body: PauseOrder, call: Annotated[Call, operating(operate)]) -> JobView:
        """Skip the job's ticks from now on; a running cycle ends as usual. Pausing twice changes nothing."""
        return await desk.pause(call, name, body.reason)

    @routes.post("/{name}/resume")
    async def resume_job(name: str, call: Annotated[Call, operating(operate)]) -> JobView:
        """Run the job again from its next tick on."""
        return await desk.resume(call, name)

    @routes.post("/{name}/run", status_code=202)
    async def run_job(name: str, call: Annotated[Call, operating(operate)]) -> JobView:
        """Have one process run the job as soon as it rests (within seconds)."""
        return await desk.run(call, name)

    return routes


class _Desk:
    """What the routes do."""

    def __init__(self, schema: str, jobs: Sequence[Job]) -> None:
        self.jobs = {job.name: job for job in jobs}
        self._schema = schema
        self._records = JobRecords(schema)
        self._audit = Audit(schema)

    async def pause(self, call: Call, name: str, reason: str) -> JobView:
        self._require(name)
        now = await call.now()
        if await self._records.pause(call.session, name, now, call.principal.subject, reason):
            await self._note(call, now, name, "job.paused", {"reason": reason})
        return await self._view(call, name)

    async def resume(self, call: Call, name: str) -> JobView:
        self._require(name)
        if await self._records.resume(call.session, name):
            await self._note(call, await call.now(), name, "job.resumed", {})
        return await self._view(call, name)

    async def run(self, call: Call, name: str) -> JobView:
        self._require(name)
        now = await call.now()
        if await self._records.request_run(call.session, name, now, call.principal.subject):
            await self._note(call, now, name, "job.run-requested", {})
        elif await self._records.find_pause(call.session, name):
            raise JobPaused(f"the job {name} is paused; resume it first")
        return await self._view(call, name)

    def _require(self, name: str) -> None:
        if name not in self.jobs:
            raise JobNotFound(f"there is no job {name[:100]}")

    async def _view(self, call: Call, name: str) -> JobView:
        return (await self.views(call, [name]))[0]

    async def views(self, call: Call, names: list[str]) -> list[JobView]:
        now = await call.now()
        rows = await self._records.overview(call.session, names, now)
        return [_view(self.jobs[row["name"]], row, now) for row in rows]

    async def _note(self, call: Call, now: datetime, name: str, action: str, details: dict[str, str]) -> None:
        job_id = uuid5(EVENTS_NAMESPACE, f"job/{self._schema}/{name}")
        record = AuditRecord(action, "job", job_id, None, {"job": name, **details})
        await self._audit.record(
            call.session, [record], occurred_at=now, actor=call.principal.subject, correlation_id=call.correlation_id
        )


def _view(job: Job, row: dict[str, Any], now: datetime) -> JobView:
    paused = (
        PauseView(at=row["paused_at"], by=row["paused_by"], reason=row["pause_reason"]) if row["paused_at"] else None
    )
    last = RunView(**{name: row[name] for name in RunView.model_fields}) if row["id"] else None
    return JobView(
        name=job.name,
        schedule=_schedule(job),
        misfire=job.misfire,
        running=row["running"],
        last_run=last,
        next_run_at=None if paused else max(now, job.next_after(row["ticked_at"], now)),
        run_requested_at=row["run_requested_at"],
        paused=paused,
    )


def _schedule(job: Job) -> str:
    if isinstance(job.schedule, DailyAt):
        return f"daily at {job.schedule.at:%H:%M} {job.schedule.zone.key}"
    return f"every {job.schedule.total_seconds():g} s"

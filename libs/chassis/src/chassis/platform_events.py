"""The events that chassis itself emits for every service, each declared in that service's contract.

Readers on call and the event log see the same names and envelopes whatever the service.
"""

from typing import Any, Final, Literal, TypedDict

from chassis.outbox import EventType

SYSTEM_KEY: Final = "system"
"""The key of audit records that no person or client caused."""


class QuarantinedPayload(TypedDict):
    """Payload of `message.quarantined`: where the message is, and why it could not be handled; never its content."""

    consumer: str
    topic: str
    partition: int
    offset: int
    disposition: Literal["quarantine", "refused", "exhausted"]
    errorClass: str
    errorCode: str
    deadLetterId: str
    eventId: str | None
    subjectId: str | None


class AuditRecordedPayload(TypedDict):
    """Payload of `audit.recorded`: one sealed audit row with its place in the chain of hashes."""

    auditId: str
    sequence: int
    occurredAt: str
    actor: str | None
    action: str
    entityType: str
    entityId: str
    tenantId: str | None
    correlationId: str
    details: dict[str, Any]
    previousHash: str
    hash: str


def quarantined(context: str) -> EventType:
    """Return the event that announces a dead letter or a parked message.

    Args:
        context: the service's token (`crm`, `ops`, ...).
    """
    return EventType(
        topic=f"pin.{context}.operational.v1",
        type="message.quarantined",
        source=f"/pin/{context}",
        aggregate_type="DeadLetter",
        event_class="operational",
    )


def audit_recorded(context: str) -> EventType:
    """Return the event that carries a sealed audit row to the event log.

    Args:
        context: the service's token (`crm`, `ops`, ...).
    """
    return EventType(
        topic=f"pin.{context}.audit.v1",
        type="audit.recorded",
        source=f"/pin/{context}",
        aggregate_type="AuditRecord",
        event_class="audit",
    )

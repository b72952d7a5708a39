"""What people change about an object: whether it is shown, whether it is sold, its price."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from chassis.outbox import Cause
from chassis.preconditions import ANY_VERSION, Precondition
from chessboard import repository
from chessboard.domain import Change, PropertyObject, StatusSource, VersionConflict
from chessboard.repository import Origin


@dataclass(frozen=True, slots=True)
class By:
    """Who gives a command, when and under which correlation id."""

    tenant_id: UUID
    user_id: str
    now: datetime
    correlation_id: str

    @property
    def origin(self) -> Origin:
        """What the writer notes of it."""
        return Origin(self.now, self.user_id, Cause(self.correlation_id))


async def hide_object(
    session: AsyncSession, property_object_id: UUID, by: By, expected: Precondition = ANY_VERSION
) -> PropertyObject:
    """Take a free object out of the grid.

    Raises:
        PropertyObjectNotFound: no such object in the caller's tenant.
        StatusTransitionRefused: it isn't free.
        PreconditionFailed: it is not at the expected version.
    """
    found = await _expected(session, property_object_id, expected)
    return await _write(session, found, found.hide(StatusSource.ADMIN, by.now), by)


async def unhide_object(
    session: AsyncSession, property_object_id: UUID, by: By, expected: Precondition = ANY_VERSION
) -> PropertyObject:
    """Put a hidden object back into the grid.

    Raises:
        PropertyObjectNotFound: no such object in the caller's tenant.
        StatusTransitionRefused: it isn't hidden.
        PreconditionFailed: it is not at the expected version.
    """
    found = await _expected(session, property_object_id, expected)
    return await _write(session, found, found.unhide(StatusSource.ADMIN, by.now), by)


async def sell_object(
    session: AsyncSession, property_object_id: UUID, by: By, expected: Precondition = ANY_VERSION
) -> PropertyObject:
    """Mark a free object as sold outside of CRM.

    Raises:
        PropertyObjectNotFound: no such object in the caller's tenant.
        StatusTransitionRefused: it isn't free.
        PreconditionFailed: it is not at the expected version.
    """
    found = await _expected(session, property_object_id, expected)
    return await _write(session, found, found.sell(None, by.now, StatusSource.ADMIN, by.now), by)


async def reprice_object(
    session: AsyncSession,
    property_object_id: UUID,
    price_minor: int,
    currency: str,
    by: By,
    expected: Precondition = ANY_VERSION,
) -> PropertyObject:
    """Change the price of an object that is not sold; open quotes of CRM end by it.

    Raises:
        PropertyObjectNotFound: no such object in the caller's tenant.
        StatusTransitionRefused: it is sold.
        PreconditionFailed: it is not at the expected version.
    """
    found = await _expected(session, property_object_id, expected)
    return await _write(session, found, found.reprice(price_minor, currency, by.now), by)


async def _expected(session: AsyncSession, property_object_id: UUID, expected: Precondition) -> PropertyObject:
    found = await repository.get_for_update(session, property_object_id)
    expected.check(found.version)
    return found


async def _write(session: AsyncSession, changed: PropertyObject, change: Change, by: By) -> PropertyObject:
    if await repository.write_changes(session, [change], by.origin):
        raise VersionConflict(f"object {changed.id} has changed since it was read")
    return changed

"""A property object for tests of the domain, and what must hold of it whatever happened."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import UUID, uuid4

from chessboard.domain import HELD, Hold, PropertyObject, Status

NOW = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)
UNTIL = NOW + timedelta(hours=1)
MINE = Hold(UUID(int=1), UUID(int=2))
FREE, RESERVED, BOOKED, SOLD, HIDDEN = Status


def unit(status: Status = FREE) -> PropertyObject:
    return PropertyObject(
        id=uuid4(),
        tenant_id=uuid4(),
        project_id=uuid4(),
        building_id=uuid4(),
        section=1,
        number="12",
        floor=3,
        rooms=2,
        area=Decimal("54.3"),
        price_minor=100,
        currency="RUB",
        status_changed_at=NOW - timedelta(days=1),
        created_at=NOW - timedelta(days=1),
        updated_at=NOW - timedelta(days=1),
        status=status,
        reserved_until=UNTIL if status is RESERVED else None,
        booked_until=UNTIL if status is BOOKED else None,
        hold=MINE if status in HELD else None,
        sold_at=NOW if status is SOLD else None,
        version=5,
    )


def state(of: PropertyObject) -> tuple[object, ...]:
    return tuple(getattr(of, name) for name in PropertyObject.__slots__)


def is_sound(of: PropertyObject) -> bool:
    return (
        (of.reserved_until is not None) == (of.status is RESERVED)
        and (of.booked_until is not None) == (of.status is BOOKED)
        and (of.hold is not None) == (of.status in HELD)
        and (of.sold_at is not None) == (of.status is SOLD)
    )

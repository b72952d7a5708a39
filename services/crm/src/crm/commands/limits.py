"""Use cases of partners' limits: what their bookings may cost together."""

from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.audit import AuditRecord
from crm.commands.settling import AUDIT, By

_SET = text(
    "insert into crm.partner_limit as l (tenant_id, partner_id, currency, limit_minor, used_minor)"
    " values (:tenant, :partner, :currency, :limit, 0)"
    " on conflict (tenant_id, partner_id) do update set limit_minor = excluded.limit_minor"
    " where l.currency = excluded.currency returning l.used_minor"
)


class LimitCurrencyFixed(Exception):
    """The partner has a limit in another currency, and what is used of it can't be converted."""


async def set_partner_limit(session: AsyncSession, partner_id: UUID, limit_minor: int, currency: str, by: By) -> int:
    """Set a partner's limit, at or below what is used too; return what is used.

    Raises:
        LimitCurrencyFixed: it has one in another currency.
    """
    values = {"tenant": by.tenant_id, "partner": partner_id, "currency": currency, "limit": limit_minor}
    used = (await session.execute(_SET, values)).scalar_one_or_none()
    if used is None:
        raise LimitCurrencyFixed(f"the limit of partner {partner_id} is not in {currency}")
    record = AuditRecord("partner-limit.set", "partner", partner_id, by.tenant_id, {})
    await AUDIT.record(session, [record], occurred_at=by.now, actor=by.user_id, correlation_id=by.correlation_id)
    return int(used)

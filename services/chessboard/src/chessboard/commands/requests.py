"""A request of CRM: settled by the domain under the object's lock, written, and answered."""

from sqlalchemy.ext.asyncio import AsyncSession

from chessboard import repository
from chessboard.domain import Request, Settlement, settle
from chessboard.messages import to_answer
from chessboard.repository import OUTBOX, Origin


async def settle_request(session: AsyncSession, request: Request, origin: Origin) -> Settlement:
    """Do what CRM asks for, or not, and answer it.

    Whatever comes of it is answered, a repeated request and a mismatch of holds too: CRM waits for each answer.
    """
    found = (await repository.find_for_update(session, [request.property_object_id])).get(request.property_object_id)
    ledger = await repository.get_ledger(session, request.property_object_id)
    settlement = settle(request, found, ledger, origin.now)
    if settlement.changes:
        await repository.write_changes(session, settlement.changes, origin)
    await repository.write_ledger(session, ledger)
    await OUTBOX.emit(session, [to_answer(request, settlement, found, origin.now)], origin.cause)
    return settlement

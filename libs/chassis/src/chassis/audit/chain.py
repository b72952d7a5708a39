"""The chain over audit rows: what a link hashes, and where the chain ends.

A link is sha256(previous hash, position, the row's content), so that whoever changes, removes or inserts a row has to
make every later link anew, and a head that somebody remembers (or read on the topic) shows it.

The order is that of (transaction id, row id), cut off below the oldest transaction that still runs: whatever can still
commit sorts behind what is sealed, so that no row can slip in between later. For transactions that follow one another
this is the order of their commits.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import asyncpg
import orjson
from sqlalchemy import BigInteger, Column, DateTime, LargeBinary, MetaData, Table, UniqueConstraint
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.db import driver_connection
from chassis.instants import rfc3339

FIRST_HASH: Final = bytes(32)
"""What the first link takes for its predecessor."""

CONTENT: Final = (
    "a.id, a.occurred_at, a.actor, a.action, a.entity_type, a.entity_id, a.tenant_id, a.correlation_id,"
    " a.details::text as details, a.xid::text::bigint as xid"
)
"""The columns of an audit row (alias `a`) that a link needs."""


@dataclass(frozen=True, slots=True)
class Head:
    """The last link of a chain, as somebody may remember it.

    Attributes:
        sequence: its position, from 1; 0 for an empty chain.
        hash: its hash.
    """

    sequence: int
    hash: bytes

    def __str__(self) -> str:
        return f"{self.sequence}:{self.hash.hex()}"

    @classmethod
    def parse(cls, said: str) -> "Head":
        """Read `SEQ:HASH`.

        Raises:
            ValueError: it is something else.
        """
        sequence, _, digest = said.partition(":")
        head = cls(int(sequence), bytes.fromhex(digest))
        if head.sequence < 0 or len(head.hash) != len(FIRST_HASH):
            raise ValueError(f"not SEQ:HASH: {said!r}")
        return head


def audit_seal_table(metadata: MetaData) -> Table:
    """Return the table of links for a service's metadata; append-only like the audit log."""
    return Table(
        "audit_seal",
        metadata,
        Column("sequence", BigInteger, primary_key=True, autoincrement=False),
        Column("audit_id", BigInteger, nullable=False),
        Column("previous_hash", LargeBinary, nullable=False),
        Column("hash", LargeBinary, nullable=False),
        Column("sealed_at", DateTime(timezone=True), nullable=False),
        UniqueConstraint("audit_id", name="uq_audit_seal_audit_id"),
    )


def link_hash(previous: bytes, sequence: int, row: asyncpg.Record) -> bytes:
    """Return the hash of a link.

    Args:
        previous: hash of the link before.
        sequence: the link's position.
        row: the audit row, with the columns CONTENT. `details` is hashed as Postgres writes jsonb: no number loses a
            digit on the way.
    """
    content: list[Any] = [
        row["id"],
        rfc3339(row["occurred_at"]),
        row["actor"],
        row["action"],
        row["entity_type"],
        str(row["entity_id"]),
        None if row["tenant_id"] is None else str(row["tenant_id"]),
        row["correlation_id"],
        row["details"],
    ]
    return hashlib.sha256(previous + sequence.to_bytes(8, "big") + orjson.dumps(content)).digest()


async def find_head(session: AsyncSession, schema: str) -> Head:
    """Return the last link of a service's chain; position 0 if there is none."""
    connection = await driver_connection(session)
    row = await connection.fetchrow(f"select sequence, hash from {schema}.audit_seal order by sequence desc limit 1")
    return Head(row["sequence"], row["hash"]) if row else Head(0, FIRST_HASH)

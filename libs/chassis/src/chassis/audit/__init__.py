"""The audit of a service: rows written with what they speak of, chained by hash soon after, checked by a verifier."""

from chassis.audit.chain import Head, audit_seal_table, find_head
from chassis.audit.log import Audit, AuditRecord, audit_table
from chassis.audit.sealer import AuditSealer
from chassis.audit.verifier import BrokenLink, verify

__all__ = [
    "Audit",
    "AuditRecord",
    "AuditSealer",
    "BrokenLink",
    "Head",
    "audit_seal_table",
    "audit_table",
    "find_head",
    "verify",
]

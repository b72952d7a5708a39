"""Contracts: the AsyncAPI files read, judged, compared with their released versions, and made into topics.

`python -m chassis.contracts --help` lists what can be done with them. The modules that judge files (`governance`,
`evolution`, `releases`, `acl`, `queues`) are imported where they are used: a service needs the reader and the checker.
"""

from chassis.contracts.checker import ContractBreach, ContractChecker
from chassis.contracts.reader import (
    Contract,
    ContractInvalid,
    DeclaredMessage,
    contract_of,
    every_message,
    load_contracts,
)
from chassis.contracts.topics import drift, ensure_topics, undeclared

__all__ = [
    "Contract",
    "ContractBreach",
    "ContractChecker",
    "ContractInvalid",
    "DeclaredMessage",
    "contract_of",
    "drift",
    "ensure_topics",
    "every_message",
    "load_contracts",
    "undeclared",
]

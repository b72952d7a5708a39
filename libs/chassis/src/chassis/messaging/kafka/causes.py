"""Why a broker can't be used, in words for the person who must put it right; credentials are never among them.

The library's clients keep no cause when none of the bootstrap servers takes them: `Unable to bootstrap` stands for a
closed port, an unknown certificate and a wrong password alike. So its own way to connect is tried once more.
"""

import asyncio
import ssl
from typing import Final

from aiokafka.conn import create_conn
from aiokafka.errors import AuthenticationFailedError, KafkaConnectionError, KafkaError, SaslAuthenticationFailed

from chassis.messaging.records import BrokerUnavailable, KafkaAddress, unavailable

LONGEST_LOOK: Final = 2.0
"""Seconds for all bootstrap servers together; a host that doesn't answer is described by the first error."""

_OF_OURS: Final = ("certificate required", "bad certificate", "certificate unknown", "unknown ca")
_CLOSED: Final = (
    "the broker closed the connection unanswered; does this port speak {security}, and is our request allowed?"
)


async def not_connected(address: KafkaAddress, error: BaseException) -> BrokerUnavailable:
    """Return what a failure to connect means, with its cause where one more attempt tells it."""
    if isinstance(error, KafkaConnectionError):
        try:
            async with asyncio.timeout(LONGEST_LOOK):
                found = await _first_cause(address)
        except TimeoutError:
            found = None
        if found is not None:
            return BrokerUnavailable(f"{address.bootstrap}: {_sentence(found, address)}")
    return unavailable(address, error)


async def _first_cause(address: KafkaAddress) -> BaseException | None:
    arguments = address.client_arguments()
    for broker in str(arguments.pop("bootstrap_servers")).split(","):
        host, _, port = broker.rpartition(":")
        try:
            connection = await create_conn(host.strip("[]"), int(port), **arguments)
        except (KafkaError, OSError) as error:
            return error
        await connection.close()
    return None


def _sentence(error: BaseException, address: KafkaAddress) -> str:
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    for one in chain:
        if isinstance(one, ssl.SSLCertVerificationError):
            return f"the broker's certificate is not accepted: {one.verify_message}"
        if isinstance(one, ssl.SSLError):
            return _tls(one)
        if isinstance(one, AuthenticationFailedError | SaslAuthenticationFailed):
            return f"user {address.username} is not accepted ({address.sasl_mechanism}): wrong user or password"
    if isinstance(chain[-1], KafkaConnectionError | EOFError | ConnectionResetError):
        return _CLOSED.format(security=address.security)
    return str(chain[-1]) or type(chain[-1]).__name__


def _tls(error: ssl.SSLError) -> str:
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if any(sign in reason for sign in _OF_OURS):
        return f"our client certificate is missing or not accepted: {reason}"
    return f"no TLS connection: {reason}; does this port speak TLS?"

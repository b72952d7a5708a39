"""The public keys of a token issuer: given in the settings, or fetched from its JWKS address and kept.

Whatever tokens strangers send, an issuer is asked at most once a minute; keys that were fetched stay good while it is
unreachable, up to a limit.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import httpx
import orjson
import structlog
from joserfc.errors import JoseError
from joserfc.jwk import JWKRegistry, Key

from chassis.settings import JwtIssuer

FRESH_SECONDS: Final = 600.0
"""Age from which keys are fetched again."""
STALE_SECONDS: Final = 86_400.0
"""Age at which keys are no longer used though the issuer can't be reached."""
UNKNOWN_KEY_SECONDS: Final = 60.0
"""Shortest time between two fetches once there are keys."""
FIRST_FETCH_SECONDS: Final = 5.0
"""The same while there are none."""
FETCH_SECONDS: Final = 5.0
"""Longest wait for an issuer's answer, as a whole."""
MOST_BYTES: Final = 256 * 1024
MOST_KEYS: Final = 100
log = structlog.get_logger(__name__)


class IssuerUnavailable(Exception):
    """An issuer's keys can't be fetched, and none are kept; the caller is not at fault."""


class KeysNotFetched(Exception):
    """An issuer's answer was not a usable JWKS document."""


class IssuerKeys:
    """The keys of one issuer.

    Args:
        issuer: its entry of PIN_JWT_ISSUERS.
        monotonic: seconds of a clock that only ages are taken from.
    """

    def __init__(self, issuer: JwtIssuer, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._issuer = issuer
        self._monotonic = monotonic
        self._keys: Sequence[Key] = () if issuer.jwks is None else public_keys(issuer.jwks)
        self._fetched_at: float | None = None
        self._next_fetch_at = 0.0
        self._fetching = asyncio.Lock()

    async def find(self, kid: str | None, algorithm: str) -> Key | None:
        """Return the key that a token names, fetching the issuer's keys where that may help and is due.

        A token without a key id is answered only by an issuer that has a single key for the algorithm.

        Raises:
            IssuerUnavailable: there are no keys, or they are older than STALE_SECONDS.
        """
        if self._issuer.jwks_url is None:
            return _select(self._keys, kid, algorithm)
        if self._age() > FRESH_SECONDS:
            await self._fetch_once(must_wait=self._age() > STALE_SECONDS)
        if self._age() > STALE_SECONDS:
            raise IssuerUnavailable("the issuer's keys can't be fetched")
        found = _select(self._keys, kid, algorithm)
        if found is None:
            await self._fetch_once(must_wait=True)
            found = _select(self._keys, kid, algorithm)
        return found

    def _age(self) -> float:
        return float("inf") if self._fetched_at is None else self._monotonic() - self._fetched_at

    async def _fetch_once(self, *, must_wait: bool) -> None:
        if self._fetching.locked() and not must_wait:
            return
        async with self._fetching:
            if self._monotonic() < self._next_fetch_at:
                return
            try:
                self._keys = await fetch_keys(str(self._issuer.jwks_url))
                self._fetched_at = self._monotonic()
            except (KeysNotFetched, httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
                log.warning("keys of an issuer not fetched", issuer=self._issuer.issuer, error=repr(error)[:300])
            pause = FIRST_FETCH_SECONDS if self._age() > STALE_SECONDS else UNKNOWN_KEY_SECONDS
            self._next_fetch_at = self._monotonic() + pause


async def fetch_keys(address: str) -> Sequence[Key]:
    """Fetch a JWKS document: bounded in time and size, no redirects.

    Raises:
        httpx.HTTPError, TimeoutError, OSError: no answer.
        KeysNotFetched: an answer without usable keys, too long, or a redirect.
    """
    async with (
        asyncio.timeout(FETCH_SECONDS),
        httpx.AsyncClient(timeout=FETCH_SECONDS, follow_redirects=False) as client,
        client.stream("GET", address, headers={"accept": "application/json"}) as answer,
    ):
        if answer.status_code != httpx.codes.OK:
            raise KeysNotFetched(f"status {answer.status_code}")
        content = bytearray()
        async for piece in answer.aiter_bytes():
            content += piece
            if len(content) > MOST_BYTES:
                raise KeysNotFetched(f"more than {MOST_BYTES} bytes")
    try:
        keys = public_keys(orjson.loads(bytes(content)))
    except ValueError as error:
        raise KeysNotFetched("not a JWKS document") from error
    if not keys:
        raise KeysNotFetched("no public signature key")
    return keys


def public_keys(document: Any) -> Sequence[Key]:
    """Return the usable public signature keys of a JWKS document; keys of other kinds are passed over.

    Raises:
        ValueError: the document is none.
    """
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list) or len(entries) > MOST_KEYS:
        raise ValueError(f"not a JWKS document of at most {MOST_KEYS} keys")
    return [key for entry in entries if (key := _public_key(entry)) is not None]


def _public_key(entry: Any) -> Key | None:
    if not isinstance(entry, dict) or entry.get("kty") not in _KEY_TYPES.values() or entry.get("use", "sig") != "sig":
        return None
    try:
        key = JWKRegistry.import_key(entry)
    except (JoseError, LookupError, TypeError, ValueError, AttributeError):
        return None
    return None if key.is_private else key


_KEY_TYPES: Final = {"RS256": "RSA", "ES256": "EC", "Ed25519": "OKP"}


def _select(keys: Sequence[Key], kid: str | None, algorithm: str) -> Key | None:
    fitting = [
        key
        for key in keys
        if key.key_type == _KEY_TYPES[algorithm] and key.get("alg") in (None, algorithm, _OLDER_NAMES.get(algorithm))
    ]
    if kid is not None:
        return next((key for key in fitting if key.kid == kid), None)
    return fitting[0] if len(fitting) == 1 else None


_OLDER_NAMES: Final = {"Ed25519": "EdDSA"}
"""What a JWKS may call the same algorithm."""

"""Who calls: access tokens are verified against fixed issuers and algorithms, and become a principal.

A route declares the scope it needs; a token without it is refused before any row is read. Nothing in a token's header
chooses more than one of its issuer's own keys.
"""

import base64
import binascii
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from joserfc import jws, jwt
from joserfc.errors import JoseError

from chassis.db import Actor
from chassis.jwks import IssuerKeys, IssuerUnavailable
from chassis.settings import JwtIssuer

__all__ = ["Forbidden", "IssuerUnavailable", "Principal", "TokenVerifier", "Unauthenticated"]

LONGEST_TOKEN: Final = 8192
LONGEST_KEY_ID: Final = 256
TOKEN_TYPES: Final = frozenset({"jwt", "at+jwt", "application/at+jwt"})
"""Values of `typ` (lower case) that an access token may have; one made for another purpose is none."""

_PART: Final = re.compile(r"[A-Za-z0-9_-]+")
_SUBJECT: Final = re.compile(r"[^\s\x00-\x1f\x7f]{1,255}")
_ROLE: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_MOST_ROLES: Final = 50


class Unauthenticated(Exception):
    """No token, or one that is not valid; the text is safe to show."""


class Forbidden(Exception):
    """The token is valid and doesn't carry what the route needs."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of a request.

    Attributes:
        subject: user or client id.
        tenant_id: the tenant whose data the caller may see.
        partner_id: set for an API client of a tenant.
        roles: platform and tenant roles.
        scopes: what the token allows.
        accepted_for: seconds for which the token would still be accepted when it was.
    """

    subject: str
    tenant_id: UUID
    partner_id: UUID | None
    roles: frozenset[str]
    scopes: frozenset[str]
    accepted_for: float = field(default=math.inf, compare=False)

    @property
    def actor(self) -> Actor:
        """The caller as the database sees it."""
        return Actor(self.tenant_id, self.partner_id, self.subject, self.roles)

    def require(self, scope: str) -> None:
        """Check that the token carries a scope.

        Raises:
            Forbidden: it doesn't.
        """
        if scope not in self.scopes:
            raise Forbidden(f"scope {scope} is required")


UNREADABLE: Final = (JoseError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What decoding raises for a token that nobody honest made: anyone may send any bytes."""


class TokenVerifier:
    """Verifies bearer tokens (signature, issuer, audience, times) and reads their claims.

    Args:
        issuers: whose tokens are accepted, each with its algorithms and keys.
        leeway: seconds that clocks may differ.
        monotonic: seconds of the clock by which fetched keys age.
    """

    def __init__(
        self, issuers: Sequence[JwtIssuer], leeway: int = 30, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._trusted = {issuer.issuer: (issuer, IssuerKeys(issuer, monotonic)) for issuer in issuers}
        self._leeway = leeway

    async def verify(self, token: str) -> Principal:
        """Return the principal of a token.

        Raises:
            Unauthenticated: the token is not acceptable.
            IssuerUnavailable: it can't be judged, since its issuer's keys can't be fetched.
        """
        header, claims = _parts(token)
        trusted = self._trusted.get(claims["iss"]) if isinstance(claims.get("iss"), str) else None
        if trusted is None:
            raise Unauthenticated("the access token is not signed by a trusted issuer")
        issuer, keys = trusted
        algorithm = header.get("alg")
        if not isinstance(algorithm, str) or algorithm not in issuer.algorithms:
            raise Unauthenticated("the access token is not signed by a trusted issuer")
        key = await keys.find(_key_id(header), algorithm)
        if key is None or not _is_signed(token, key, algorithm):
            raise Unauthenticated("the access token is not signed by a trusted issuer")
        checked_at = self._check(claims, issuer)
        return _principal(claims, lambda exp: float(exp + self._leeway - checked_at))

    def _check(self, claims: dict[str, Any], issuer: JwtIssuer) -> int:
        """Return the time by which a token is acceptable."""
        registry = jwt.JWTClaimsRegistry(
            leeway=self._leeway,
            iss={"essential": True, "value": issuer.issuer},
            aud={"essential": True, "value": issuer.audience},
            exp={"essential": True},
            sub={"essential": True},
        )
        try:
            registry.validate(claims)
        except JoseError as error:
            raise Unauthenticated(f"the access token is refused: {error.description or error.error}") from error
        return registry.now


def _parts(token: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return header and claims of a compact token; nothing in them is believed yet."""
    parts = token.split(".") if len(token) <= LONGEST_TOKEN else []
    if len(parts) != 3 or not all(_PART.fullmatch(part) for part in parts):
        raise Unauthenticated("the access token is not a signed token")
    try:
        header, claims = (_json_object(part) for part in parts[:2])
    except UNREADABLE as error:
        raise Unauthenticated("the access token can't be read") from error
    kind = header.get("typ", "JWT")
    if "crit" in header or "b64" in header or not isinstance(kind, str) or kind.lower() not in TOKEN_TYPES:
        raise Unauthenticated("the access token is of a kind that is not accepted")
    return header, claims


def _json_object(part: str) -> dict[str, Any]:
    text = base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)
    found = json.loads(text.decode(), object_pairs_hook=_once_each, parse_constant=_refuse_constant)
    if not isinstance(found, dict):
        raise TypeError("not an object")
    return found


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a name given twice: readers would disagree about which counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is given twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _key_id(header: dict[str, Any]) -> str | None:
    kid = header.get("kid")
    if "kid" in header and (not isinstance(kid, str) or len(kid) > LONGEST_KEY_ID):
        raise Unauthenticated("the access token names no key")
    return kid


def _is_signed(token: str, key: Any, algorithm: str) -> bool:
    try:
        jws.deserialize_compact(token, key, algorithms=[algorithm])
    except (*UNREADABLE, binascii.Error):
        return False
    return True


def _principal(claims: dict[str, Any], left: Callable[[Any], float]) -> Principal:
    try:
        return Principal(
            subject=_matching(_SUBJECT, claims["sub"]),
            tenant_id=UUID(claims["tenant_id"]),
            partner_id=UUID(claims["partner_id"]) if claims.get("partner_id") else None,
            roles=_roles(claims.get("roles", [])),
            scopes=frozenset(_text(claims.get("scope", "")).split()),
            accepted_for=left(claims["exp"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Unauthenticated("the access token lacks a tenant or has malformed claims") from error


def _roles(value: Any) -> frozenset[str]:
    """Return the roles; one with a comma would be two where the database reads `app.roles`."""
    if not isinstance(value, list) or len(value) > _MOST_ROLES:
        raise TypeError("roles are a list of names")
    return frozenset(_matching(_ROLE, role) for role in value)


def _matching(pattern: re.Pattern[str], value: Any) -> str:
    if pattern.fullmatch(_text(value)) is None:
        raise ValueError("unexpected characters")
    return _text(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    value.encode()
    return value

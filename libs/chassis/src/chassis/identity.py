"""Who calls: access tokens are verified against fixed issuers and algorithms, and become a principal.

A route declares the scope it needs; a token without it is refused before any row is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast
from uuid import UUID

from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from chassis.db import Actor
from chassis.settings import JwtIssuer


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
    """

    subject: str
    tenant_id: UUID
    partner_id: UUID | None
    roles: frozenset[str]
    scopes: frozenset[str]

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
    """

    def __init__(self, issuers: Sequence[JwtIssuer], leeway: int = 30) -> None:
        self._trusted = [(issuer, KeySet.import_key_set(cast("Any", issuer.jwks))) for issuer in issuers]
        self._leeway = leeway

    def verify(self, token: str) -> Principal:
        """Return the principal of a token.

        Raises:
            Unauthenticated: the token is not acceptable.
        """
        for issuer, keys in self._trusted:
            try:
                claims = jwt.decode(token, keys, algorithms=list(issuer.algorithms)).claims
            except UNREADABLE:
                continue
            if claims.get("iss") == issuer.issuer:
                self._check(claims, issuer)
                return _principal(claims)
        raise Unauthenticated("the access token is not signed by a trusted issuer")

    def _check(self, claims: dict[str, Any], issuer: JwtIssuer) -> None:
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


def _principal(claims: dict[str, Any]) -> Principal:
    try:
        return Principal(
            subject=str(claims["sub"]),
            tenant_id=UUID(claims["tenant_id"]),
            partner_id=UUID(claims["partner_id"]) if claims.get("partner_id") else None,
            roles=frozenset(map(str, claims.get("roles", ()))),
            scopes=frozenset(str(claims.get("scope", "")).split()),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unauthenticated("the access token lacks a tenant or has malformed claims") from error

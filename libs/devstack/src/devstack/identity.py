"""Access tokens for development: a key pair of this checkout, trusted by the services that the stack starts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from uuid import UUID

import orjson
from joserfc import jwt
from joserfc.jwk import OKPKey

ISSUER: Final = "pin-devstack"
AUDIENCE: Final = "pin"
ALGORITHM: Final = "Ed25519"
EVERYTHING: Final = " ".join(
    f"{service}:{what}"
    for service, things in (("crm", ("deals", "bookings", "limits")), ("chessboard", ("objects",)))
    for what in (
        *(f"{thing}:{act}" for thing in things for act in ("read", "write")),
        *(f"{thing}:{act}" for thing in ("jobs", "dead-letters") for act in ("read", "operate")),
    )
)


@dataclass(frozen=True, slots=True)
class DevelopmentIssuer:
    """Signs tokens with a key that exists on this machine only."""

    key: OKPKey

    @classmethod
    def load(cls, home: Path) -> Self:
        """Return the issuer whose key is kept in `home`, making the key the first time."""
        path = home / "token-key.json"
        if not path.exists():
            path.touch(mode=0o600)
            path.write_bytes(orjson.dumps(OKPKey.generate_key("Ed25519", {"kid": "devstack"}).as_dict(private=True)))
        return cls(OKPKey.import_key(orjson.loads(path.read_bytes())))

    def trusted(self) -> dict[str, Any]:
        """Return the entry of PIN_JWT_ISSUERS that makes a service trust this issuer."""
        return {
            "issuer": ISSUER,
            "audience": AUDIENCE,
            "algorithms": [ALGORITHM],
            "jwks": {"keys": [self.key.as_dict(private=False)]},
        }

    def token(
        self,
        tenant_id: UUID,
        *,
        subject: str = "developer",
        roles: Sequence[str] = ("MANAGER",),
        scope: str = EVERYTHING,
        seconds: int = 3600,
    ) -> str:
        """Return a signed access token.

        Args:
            tenant_id: whose data it opens.
            subject: user or client id.
            roles: the subject's roles.
            scope: what it allows, separated by blanks.
            seconds: how long it is valid.
        """
        now = int(time.time())
        claims = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": subject,
            "iat": now,
            "exp": now + seconds,
            "tenant_id": str(tenant_id),
            "roles": list(roles),
            "scope": scope,
        }
        return jwt.encode({"alg": ALGORITHM, "kid": "devstack"}, claims, self.key, algorithms=[ALGORITHM])

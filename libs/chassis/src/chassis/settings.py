"""Settings that every service reads: environment variables `PIN_...`, or files of the same names in PIN_SECRETS_DIR.

A missing or impossible value stops the process before it opens anything, with one line that names the variable.
"""

import re
from contextlib import suppress
from datetime import timedelta
from typing import Annotated, Any, Final, Literal, cast

from joserfc.errors import JoseError
from joserfc.jwk import KeySet
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_settings import SettingsError
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from chassis.kafka_settings import KafkaSettings, check_port

POSTGRES_PORT: Final = 5432
QUERY_KEYS: Final = frozenset({"sslmode", "sslrootcert", "sslcert", "sslkey", "host", "port", "pool_mode"})
"""What a database address may carry after its question mark, as libpq names it; `pool_mode` is ours (chassis.db)."""


class SettingsInvalid(Exception):
    """The environment doesn't describe a runnable service; the text has one line per variable."""


class JwtIssuer(BaseModel):
    """Whose access tokens are accepted.

    Attributes:
        issuer: value of `iss`.
        audience: value that `aud` must contain.
        algorithms: the algorithms of this issuer; the token's own header never chooses.
        jwks: its public keys (JWKS document), or
        jwks_url: where it publishes them.
    """

    issuer: str
    audience: str
    algorithms: list[Literal["RS256", "ES256", "Ed25519"]] = Field(min_length=1)
    jwks: dict[str, Any] | None = None
    jwks_url: str | None = Field(default=None, pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?(\?[^\s#]*)?$")

    @field_validator("jwks")
    @classmethod
    def _holds_public_keys(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        try:
            keys = KeySet.import_key_set(cast("Any", value)).keys
        except (JoseError, LookupError, TypeError, ValueError, AttributeError):
            raise ValueError("not a JWKS document") from None
        if not keys or any(key.is_private for key in keys):
            raise ValueError("must hold public keys, and no other")
        return value

    @model_validator(mode="after")
    def _has_one_source_of_keys(self) -> "JwtIssuer":
        if (self.jwks is None) == (self.jwks_url is None):
            raise ValueError("takes either jwks or jwks_url")
        return self


def _seconds(value: Any) -> Any:
    """Return a plain number, which the environment gives as text, as what pydantic reads as seconds."""
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value


Duration = Annotated[timedelta, BeforeValidator(_seconds)]
"""A length of time: seconds (`600`), or ISO 8601 (`PT10M`)."""


class ServiceSettings(KafkaSettings):
    """What all services have in common, besides how Kafka is reached.

    Attributes:
        database_url: the system role's address, for workers.
        api_database_url: the API role's address, under row level security.
        migrate_database_url: the owner's address, for migrations only.
        jwt_issuers: whose tokens the API accepts (JSON list).
        rate_limit: requests of one principal in one process ("600/minute"; empty: unlimited).
        cors_origins: web origins whose pages may call the API (JSON list; none by default).
        relay_interval: seconds between looks at the outbox when no local commit wakes the relay.
        otlp_endpoint: where traces go by OTLP over HTTP (`http://host:4318/v1/traces`); unset: no tracing.
        trace_ratio: share of the traces beginning here that are kept.
        relay_workers: relay workers of all processes together; each takes its share of the 64 lanes.
    """

    database_url: str = Field(pattern=r"^postgresql://")
    api_database_url: str = Field(pattern=r"^postgresql://")
    migrate_database_url: str = Field(pattern=r"^postgresql://")
    jwt_issuers: list[JwtIssuer] = Field(default=[])
    rate_limit: str = Field(default="6000/minute", pattern=r"^([1-9]\d{0,6}/(second|minute|hour))?$")
    cors_origins: list[Annotated[str, Field(pattern=r"^https?://[a-z0-9.-]+(:\d{1,5})?$")]] = Field(default=[])
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    http_host: str = "127.0.0.1"
    http_port: int = Field(default=8100, ge=0, le=65535)
    relay_interval: float = Field(default=1.0, gt=0, le=60)
    relay_workers: int = Field(default=2, ge=1, le=64)
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s@]+$")
    trace_ratio: float = Field(default=1.0, ge=0, le=1)

    @field_validator("database_url", "api_database_url", "migrate_database_url")
    @classmethod
    def _is_a_database_address(cls, value: str) -> str:
        try:
            url = make_url(value)
        except (ArgumentError, ValueError):
            raise ValueError("not of the form postgresql://role:password@host:port/name") from None
        if set(value.removeprefix("postgresql://").rpartition("@")[0]) & set("@/?#"):
            raise ValueError("in a password @ / ? # are written %40 %2F %3F %23")
        check_port(url.port or POSTGRES_PORT)
        if unknown := set(url.query) - QUERY_KEYS:
            raise ValueError(f"unknown after the question mark: {', '.join(sorted(unknown))}")
        if url.query.get("pool_mode", "session") not in ("session", "transaction"):
            raise ValueError("pool_mode is session or transaction")
        return value

    @model_validator(mode="after")
    def _keys_and_pages_come_encrypted(self) -> "ServiceSettings":
        if self.env == "development":
            return self
        if any((issuer.jwks_url or "https:").startswith("http:") for issuer in self.jwt_issuers):
            raise ValueError("PIN_JWT_ISSUERS: jwks_url must be https unless PIN_ENV=development")
        if any(origin.startswith("http:") for origin in self.cors_origins):
            raise ValueError("PIN_CORS_ORIGINS: an origin must be https unless PIN_ENV=development")
        return self

    @field_validator("jwt_issuers")
    @classmethod
    def _names_each_issuer_once(cls, value: list[JwtIssuer]) -> list[JwtIssuer]:
        if len({issuer.issuer for issuer in value}) != len(value):
            raise ValueError("an issuer is named twice")
        return value


def explain_invalid(error: ValidationError) -> SettingsInvalid:
    """Turn pydantic's report into one line per variable, without the values (they may be secrets)."""
    lines = []
    for problem in error.errors(include_input=False, include_url=False):
        said = problem["msg"].removeprefix("Value error, ")
        name = "PIN_" + "_".join(str(part) for part in problem["loc"]).upper()
        lines.append(f"{name}: {said}" if problem["loc"] else said)  # what concerns several variables names them
    return SettingsInvalid("\n".join(lines))


def explain_unreadable(error: SettingsError) -> SettingsInvalid:
    """Turn the report of a value that should be JSON into a line that names the variable."""
    field = re.search(r'field "(\w+)"', str(error))
    return SettingsInvalid(f"PIN_{field[1].upper()}: not readable as JSON" if field else str(error))

"""The environment of a service's HTTP side: where keys come from, how much a caller may ask, whose pages may call."""

import os
from collections.abc import Callable

import orjson
import pytest
from joserfc.jwk import OKPKey
from pydantic import ValidationError

from chassis.settings import ServiceSettings, explain_invalid

PUBLIC = OKPKey.generate_key("Ed25519", {"kid": "1"}).as_dict(private=False)
URL = "postgresql://role@db:5432/pin"
ISSUER = {"issuer": "i", "audience": "a", "algorithms": ["Ed25519"]}
Load = Callable[..., ServiceSettings]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Reads settings from a complete environment with some more variables."""
    for name in [name for name in os.environ if name.startswith("PIN_")]:
        monkeypatch.delenv(name)

    def read(**variables: str) -> ServiceSettings:
        urls = dict.fromkeys(("PIN_DATABASE_URL", "PIN_API_DATABASE_URL", "PIN_MIGRATE_DATABASE_URL"), URL)
        for name, value in (urls | {"PIN_KAFKA_BOOTSTRAP": "kafka:9093"} | variables).items():
            monkeypatch.setenv(name, value)
        return ServiceSettings()

    return read


def refused(load: Load, **variables: str) -> str:
    with pytest.raises(ValidationError) as caught:
        load(**variables)
    return str(explain_invalid(caught.value))


def issuers(*entries: dict[str, object]) -> str:
    return orjson.dumps([ISSUER | entry for entry in entries]).decode()


def test_keys_may_be_at_an_address(load: Load):
    [issuer] = load(PIN_JWT_ISSUERS=issuers({"jwks_url": "https://id.example/keys?tenant=1"})).jwt_issuers
    assert (issuer.jwks, issuer.jwks_url) == (None, "https://id.example/keys?tenant=1")


def test_an_issuer_has_one_source_of_keys(load: Load):
    both = {"jwks": {"keys": [PUBLIC]}, "jwks_url": "https://id.example/keys"}
    for entry in ({}, both):
        assert "takes either jwks or jwks_url" in refused(load, PIN_JWT_ISSUERS=issuers(entry))


def test_keys_come_encrypted_except_in_development(load: Load):
    plain = issuers({"jwks_url": "http://id.example/keys"})
    assert "jwks_url must be https" in refused(load, PIN_JWT_ISSUERS=plain)
    assert load(PIN_JWT_ISSUERS=plain, PIN_ENV="development").jwt_issuers


@pytest.mark.parametrize(
    "address", ["", "keys", "ftp://id.example/keys", "file:///etc/passwd", "https://", "https://u:p@id.example/keys"]
)
def test_what_is_no_address_is_refused(load: Load, address: str):
    assert "PIN_JWT_ISSUERS_0_JWKS_URL" in refused(load, PIN_JWT_ISSUERS=issuers({"jwks_url": address}))


def test_an_issuer_is_named_once(load: Load):
    twice = issuers({"jwks": {"keys": [PUBLIC]}}, {"jwks_url": "https://id.example/keys"})
    assert "an issuer is named twice" in refused(load, PIN_JWT_ISSUERS=twice)


@pytest.mark.parametrize("rate", ["600/minute", "10/second", "5/hour", ""])
def test_a_rate_is_a_number_per_time_or_nothing(load: Load, rate: str):
    assert load(PIN_RATE_LIMIT=rate).rate_limit == rate


@pytest.mark.parametrize(
    "rate", ["0/minute", "-1/minute", "600", "600/fortnight", "many", "1/minute;2/hour", "600 / minute"]
)
def test_another_rate_is_refused(load: Load, rate: str):
    assert "PIN_RATE_LIMIT" in refused(load, PIN_RATE_LIMIT=rate)


def test_no_page_may_call_unless_its_origin_is_listed(load: Load):
    assert load().cors_origins == []
    listed = ["https://app.example", "https://app.example:8443"]
    assert load(PIN_CORS_ORIGINS=orjson.dumps(listed).decode()).cors_origins == listed


@pytest.mark.parametrize(
    "origin", ["*", "null", "app.example", "https://app.example/", "https://*.example", "https://A.example"]
)
def test_what_is_no_single_origin_is_refused(load: Load, origin: str):
    assert "PIN_CORS_ORIGINS" in refused(load, PIN_CORS_ORIGINS=orjson.dumps([origin]).decode())


def test_pages_come_encrypted_except_in_development(load: Load):
    plain = '["http://localhost:3000"]'
    assert "an origin must be https" in refused(load, PIN_CORS_ORIGINS=plain)
    assert load(PIN_CORS_ORIGINS=plain, PIN_ENV="development").cors_origins

"""The environment of a service: read whole, refused with a line per variable, and never repeated in a message."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import orjson
import pytest
from joserfc.jwk import KeySet, OctKey, OKPKey
from pydantic import TypeAdapter, ValidationError
from pydantic_settings import SettingsError

from chassis.messaging import KafkaAddress
from chassis.settings import Duration, JwtIssuer, ServiceSettings, explain_invalid, explain_unreadable

DATABASE = "postgresql://role:hunter2@db.internal:5432/pin"
COMPLETE = {
    "PIN_DATABASE_URL": DATABASE,
    "PIN_API_DATABASE_URL": DATABASE,
    "PIN_MIGRATE_DATABASE_URL": DATABASE,
    "PIN_KAFKA_BOOTSTRAP": "kafka-1:9093,kafka-2:9093",
}
KEY = OKPKey.generate_key("Ed25519", {"kid": "1"})
PUBLIC = KEY.as_dict(private=False)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch):
    for name in list(os.environ):
        if name.startswith("PIN_"):
            monkeypatch.delenv(name)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Reads settings from a complete environment with some variables changed (None: not set)."""

    def read(**changes: str | None) -> ServiceSettings:
        for name, value in {**COMPLETE, **changes}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        return ServiceSettings()

    return read


def refused(load, **changes: str | None) -> list[str]:
    """Return the lines that refuse an environment."""
    with pytest.raises(ValidationError) as caught:
        load(**changes)
    text = str(explain_invalid(caught.value))
    assert "hunter2" not in text
    return text.splitlines()


def test_a_complete_environment_is_read(load):
    settings = load()
    assert settings.database_url == DATABASE
    assert settings.kafka == KafkaAddress("kafka-1:9093,kafka-2:9093", "ssl")
    assert settings.env == "production"
    assert (settings.relay_workers, settings.relay_interval, settings.log_level) == (2, 1.0, "INFO")


def test_each_missing_variable_has_its_line(load):
    assert refused(load, **dict.fromkeys(COMPLETE)) == [
        "PIN_KAFKA_BOOTSTRAP: Field required",
        "PIN_DATABASE_URL: Field required",
        "PIN_API_DATABASE_URL: Field required",
        "PIN_MIGRATE_DATABASE_URL: Field required",
    ]


def test_plaintext_is_refused_in_production_and_taken_in_development(load):
    [line] = refused(load, PIN_KAFKA_SECURITY="plaintext")
    assert "PIN_KAFKA_SECURITY" in line
    [line] = refused(load, PIN_KAFKA_SECURITY="plaintext", PIN_ENV="production")
    assert "PIN_ENV=development" in line
    assert load(PIN_KAFKA_SECURITY="plaintext", PIN_ENV="development").kafka.security == "plaintext"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PIN_ENV", "staging"),
        ("PIN_KAFKA_SECURITY", "kerberos"),
        ("PIN_LOG_LEVEL", "LOUD"),
        ("PIN_HTTP_PORT", "65536"),
        ("PIN_HTTP_PORT", "http"),
        ("PIN_RELAY_INTERVAL", "0"),
        ("PIN_RELAY_INTERVAL", "61"),
        ("PIN_RELAY_INTERVAL", "nan"),
        ("PIN_RELAY_WORKERS", "0"),
        ("PIN_RELAY_WORKERS", "65"),
        ("PIN_DATABASE_URL", "mysql://role:hunter2@db/pin"),
        ("PIN_DATABASE_URL", "postgresql://role:hunter2@db:port/pin"),
        ("PIN_API_DATABASE_URL", "postgresql://role:hun@ter2@db/pin"),
        ("PIN_API_DATABASE_URL", "postgresql://role:hun/ter2@db/pin"),
        ("PIN_API_DATABASE_URL", "postgresql://role:hun?ter2@db/pin"),
        ("PIN_API_DATABASE_URL", "postgresql://role:hun#ter2@db/pin"),
        ("PIN_DATABASE_URL", "postgresql://role:hunter2@db:99999/pin"),
        ("PIN_MIGRATE_DATABASE_URL", "postgresql://role:hunter2@db/pin?sslmod=require"),
        ("PIN_KAFKA_BOOTSTRAP", "kafka:99999"),
        ("PIN_KAFKA_BOOTSTRAP", "kafka:0"),
        ("PIN_KAFKA_BOOTSTRAP", "kafka"),
        ("PIN_KAFKA_BOOTSTRAP", "kafka:port"),
        ("PIN_KAFKA_BOOTSTRAP", "kafka:9092,"),
        ("PIN_KAFKA_BOOTSTRAP", "kafka-1:9092 kafka-2:9092"),
    ],
)
def test_an_impossible_value_is_refused_with_the_name_of_its_variable(load, name: str, value: str):
    [line] = refused(load, **{name: value})
    assert line.startswith(f"{name}: ")
    assert len(value) < 4 or value not in line


def test_a_database_address_may_ask_for_tls_as_libpq_does(load):
    address = "postgresql://role@db:5432/pin?sslmode=require"
    assert load(PIN_DATABASE_URL=address).database_url == address


def test_addresses_in_brackets_are_brokers_too(load):
    assert load(PIN_KAFKA_BOOTSTRAP="[::1]:9092,10.0.0.1:9092").kafka.bootstrap == "[::1]:9092,10.0.0.1:9092"


def test_a_password_may_hold_any_sign_that_is_escaped(load):
    assert load(PIN_DATABASE_URL="postgresql://role:a%2Fb%40c%3F%23@db:5432/pin").database_url


def test_unknown_variables_are_ignored_and_known_ones_cannot_be_changed_afterwards(load):
    settings = load(PIN_SOMETHING_ELSE="1")
    with pytest.raises(ValidationError, match="frozen"):
        settings.database_url = "postgresql://other"


def issuers(*keys: Mapping[str, object], algorithms: str = '["Ed25519"]') -> str:
    listed = orjson.dumps(keys).decode()
    return f'[{{"issuer": "i", "audience": "a", "algorithms": {algorithms}, "jwks": {{"keys": {listed}}}}}]'


def test_issuers_are_read_from_json(load):
    [issuer] = load(PIN_JWT_ISSUERS=issuers(PUBLIC)).jwt_issuers
    assert issuer == JwtIssuer(issuer="i", audience="a", algorithms=["Ed25519"], jwks={"keys": [PUBLIC]})


@pytest.mark.parametrize("algorithms", ["[]", '["none"]', '["HS256"]', '["Ed25519", "HS256"]', '"Ed25519"'])
def test_algorithms_are_asymmetric_and_at_least_one(load, algorithms: str):
    lines = refused(load, PIN_JWT_ISSUERS=issuers(PUBLIC, algorithms=algorithms))
    assert all(line.startswith("PIN_JWT_ISSUERS_0_ALGORITHMS") for line in lines)


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [{}],
        [{"kty": "RSA"}],
        [{"kty": "OKP", "crv": "Ed25519", "x": 7}],
        [{"kty": "unheard-of"}],
        [7],
        [KEY.as_dict(private=True)],
        [OctKey.generate_key(256).as_dict(private=True)],
        [PUBLIC, KEY.as_dict(private=True)],
    ],
    ids=["none", "empty", "no modulus", "number", "unknown", "not an object", "private", "symmetric", "one private"],
)
def test_keys_that_cannot_verify_are_refused(load, keys: list):
    [line] = refused(load, PIN_JWT_ISSUERS=issuers(*keys))
    assert line.startswith("PIN_JWT_ISSUERS_0_JWKS: ")
    assert PUBLIC["x"] not in line


def test_several_public_keys_are_taken(load):
    other = OKPKey.generate_key("Ed25519", {"kid": "2"}).as_dict(private=False)
    [issuer] = load(PIN_JWT_ISSUERS=issuers(PUBLIC, other)).jwt_issuers
    assert len(KeySet.import_key_set(issuer.jwks).keys) == 2


def test_a_list_that_is_not_json_is_a_line_with_its_name(load):
    with pytest.raises(SettingsError) as caught:
        load(PIN_JWT_ISSUERS='[{"hunter2')
    assert str(explain_unreadable(caught.value)) == "PIN_JWT_ISSUERS: not readable as JSON"


def test_settings_may_be_files_and_one_that_is_missing_has_its_line(tmp_path: Path):
    for name in ("PIN_DATABASE_URL", "PIN_API_DATABASE_URL"):
        (tmp_path / name).write_text(COMPLETE[name] + "\n")
    script = """
from pydantic import ValidationError
from chassis.settings import ServiceSettings, explain_invalid
try:
    ServiceSettings()
except ValidationError as error:
    print(explain_invalid(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PIN_SECRETS_DIR": str(tmp_path), "PIN_KAFKA_BOOTSTRAP": COMPLETE["PIN_KAFKA_BOOTSTRAP"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("PIN_MIGRATE_DATABASE_URL: Field required\n", "")


@pytest.mark.parametrize(("written", "seconds"), [("600", 600), ("0.5", 0.5), ("PT10M", 600), ("P1D", 86_400)])
def test_a_duration_is_written_in_seconds_or_as_iso_8601(written: str, seconds: float) -> None:
    assert TypeAdapter(Duration).validate_python(written).total_seconds() == seconds


def test_what_is_no_duration_is_refused() -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Duration).validate_python("ten minutes")

"""Settings that lead to Kafka: incomplete or unreadable ones are one line that names the variable and no secret."""

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat
from kafka_identities import Authority
from pydantic import ValidationError

from chassis.kafka_settings import KafkaSettings
from chassis.settings import explain_invalid

SECRET = "hunter2"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch):
    """Reads an environment and returns the one line that refuses it."""
    for name in [name for name in os.environ if name.startswith("PIN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIN_KAFKA_BOOTSTRAP", "kafka:9093")

    def read(**variables: object) -> str:
        for name, value in variables.items():
            monkeypatch.setenv(f"PIN_KAFKA_{name}", str(value))
        with pytest.raises(ValidationError) as caught:
            KafkaSettings()
        [line] = str(explain_invalid(caught.value)).splitlines()
        assert SECRET not in line
        return line

    return read


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.mark.parametrize("given", [{"USERNAME": "crm"}, {"PASSWORD": SECRET}, {}], ids=["user", "password", "neither"])
def test_a_user_without_a_password_is_refused(refused, given):
    line = refused(SECURITY="sasl_ssl", **given)
    assert line == "PIN_KAFKA_SECURITY=sasl_ssl needs PIN_KAFKA_USERNAME and PIN_KAFKA_PASSWORD"


def test_credentials_that_would_not_be_used_are_refused(refused):
    line = refused(SECURITY="ssl", USERNAME="crm", PASSWORD=SECRET)
    assert line == "PIN_KAFKA_USERNAME and PIN_KAFKA_PASSWORD need PIN_KAFKA_SECURITY=sasl_ssl"


@pytest.mark.parametrize("which", [0, 1], ids=["certificate", "key"])
def test_a_certificate_without_its_key_is_refused(refused, authority, which):
    name = ("CERT_FILE", "KEY_FILE")[which]
    line = refused(**{name: authority.issue("crm")[which]})
    assert line == "PIN_KAFKA_CERT_FILE and PIN_KAFKA_KEY_FILE belong together"


@pytest.mark.parametrize("name", ["CA_FILE", "CERT_FILE", "KEY_FILE"])
@pytest.mark.parametrize("kind", ["missing", "folder", "text", "bytes"])
def test_a_file_that_holds_nothing_of_use_is_refused_by_its_variable(refused, tmp_path, name, kind):
    path = tmp_path / "file"
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(f"nothing {SECRET}".encode() if kind == "text" else bytes(range(256)))
    assert refused(**{name: path}).startswith(f"PIN_KAFKA_{name}: ")


def test_a_key_of_another_certificate_is_refused(refused, authority):
    cert, key = authority.issue("crm")[0], authority.issue("ops")[1]
    line = refused(CERT_FILE=cert, KEY_FILE=key)
    assert line.startswith("PIN_KAFKA_CERT_FILE and PIN_KAFKA_KEY_FILE: ")
    assert "mismatch" in line.lower().replace("_", " ")


def test_a_key_under_a_password_is_refused_and_asks_nobody(refused, authority, tmp_path):
    key = tmp_path / "locked.pem"
    private = ec.generate_private_key(ec.SECP256R1())
    key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")))
    line = refused(CERT_FILE=authority.issue("crm")[0], KEY_FILE=key)
    assert line.startswith("PIN_KAFKA_CERT_FILE and PIN_KAFKA_KEY_FILE: ")

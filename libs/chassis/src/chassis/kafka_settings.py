"""How a process reaches Kafka, read from `PIN_KAFKA_...` and judged whole before anything is opened.

Services and the deploy step that makes topics share it, so that neither can be the one that speaks plaintext.
"""

import os
import ssl
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, FilePath, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from chassis.messaging import KafkaAddress

_BROKER: Final = r"(\[[0-9A-Fa-f:]+\]|[^\s,:]+):\d{1,5}"
LAST_PORT: Final = 65535


class KafkaSettings(BaseSettings):
    """Where Kafka is, whom to trust and who we are.

    Attributes:
        env: production, or development (which allows plaintext Kafka).
        kafka_bootstrap: `host:port[,host:port]`.
        kafka_security: ssl, sasl_ssl (user and password within TLS), or plaintext in development.
        kafka_ca_file, kafka_cert_file, kafka_key_file: PEM files: whom to trust, and our own certificate.
        kafka_sasl_mechanism, kafka_username, kafka_password: for sasl_ssl.
    """

    model_config = SettingsConfigDict(
        env_prefix="PIN_", extra="ignore", frozen=True, secrets_dir=os.environ.get("PIN_SECRETS_DIR") or None
    )

    env: Literal["development", "production"] = "production"
    kafka_bootstrap: str = Field(pattern=f"^{_BROKER}(,{_BROKER})*$")
    kafka_security: Literal["plaintext", "ssl", "sasl_ssl"] = "ssl"
    kafka_ca_file: FilePath | None = None
    kafka_cert_file: FilePath | None = None
    kafka_key_file: FilePath | None = None
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    kafka_username: str | None = None
    kafka_password: SecretStr | None = None

    @field_validator("kafka_bootstrap")
    @classmethod
    def _has_possible_ports(cls, value: str) -> str:
        for broker in value.split(","):
            check_port(int(broker.rpartition(":")[2]))
        return value

    @field_validator("kafka_ca_file")
    @classmethod
    def _holds_certificates(cls, value: Path | None) -> Path | None:
        if value is not None:
            try:
                ssl.create_default_context(cafile=str(value))
            except OSError as error:  # SSLError too
                raise ValueError(f"holds no certificate that can be read ({_reason(error)})") from None
        return value

    @field_validator("kafka_cert_file", "kafka_key_file")
    @classmethod
    def _holds_pem(cls, value: Path | None) -> Path | None:
        if value is not None:
            try:
                found = "-----BEGIN " in value.read_text(encoding="ascii")
            except (OSError, ValueError) as error:
                raise ValueError(f"can't be read as PEM ({type(error).__name__})") from None
            if not found:
                raise ValueError("is no PEM file")
        return value

    @model_validator(mode="after")
    def _plaintext_is_for_development(self) -> "KafkaSettings":
        if self.kafka_security == "plaintext" and self.env != "development":
            raise ValueError("PIN_KAFKA_SECURITY=plaintext is refused unless PIN_ENV=development")
        return self

    @model_validator(mode="after")
    def _kafka_credentials_are_complete(self) -> "KafkaSettings":
        named = [self.kafka_username, self.kafka_password]
        if self.kafka_security == "sasl_ssl" and not all(named):
            raise ValueError("PIN_KAFKA_SECURITY=sasl_ssl needs PIN_KAFKA_USERNAME and PIN_KAFKA_PASSWORD")
        if self.kafka_security != "sasl_ssl" and any(named):
            raise ValueError("PIN_KAFKA_USERNAME and PIN_KAFKA_PASSWORD need PIN_KAFKA_SECURITY=sasl_ssl")
        if (self.kafka_cert_file is None) != (self.kafka_key_file is None):
            raise ValueError("PIN_KAFKA_CERT_FILE and PIN_KAFKA_KEY_FILE belong together")
        try:
            self.kafka.client_arguments()
        except OSError as error:
            raise ValueError(f"PIN_KAFKA_CERT_FILE and PIN_KAFKA_KEY_FILE: {_reason(error)}") from None
        return self

    @property
    def kafka(self) -> KafkaAddress:
        """Where Kafka is."""
        return KafkaAddress(
            self.kafka_bootstrap,
            self.kafka_security,
            ca_file=_text(self.kafka_ca_file),
            cert_file=_text(self.kafka_cert_file),
            key_file=_text(self.kafka_key_file),
            sasl_mechanism=self.kafka_sasl_mechanism,
            username=self.kafka_username,
            password=self.kafka_password.get_secret_value() if self.kafka_password else None,
        )


def check_port(port: int) -> None:
    """Refuse a number that no TCP port has.

    Raises:
        ValueError: it is outside 1..65535.
    """
    if not 1 <= port <= LAST_PORT:
        raise ValueError(f"no such port: {port}")


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__

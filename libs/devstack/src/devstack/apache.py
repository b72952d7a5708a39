"""Tries the real Apache Kafka: fetches it, starts it beside nothing else, and takes one record there and back.

Where it can't be had one line says "Apache Kafka: not run" and why, which is a failure in CI only.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import orjson
from confluent_kafka import Producer

from chassis.contracts import Contract, DeclaredMessage, ensure_topics, load_contracts
from chassis.messaging import KafkaAddress
from chassis.testing.apache_kafka import KAFKA_VERSION, ApacheKafka, KafkaUnavailable, fetch
from chassis.testing.kafka import TopicReader, cache_folder
from devstack.stack import ROOT

CACHE: Final = cache_folder(ROOT)
CONTRACTS: Final = ROOT / "contracts"


def try_apache_kafka(cache: Path = CACHE) -> int:
    """Print what Apache Kafka does here and how to use it.

    Args:
        cache: where its jars are kept.

    Returns:
        0 when it works, or when it can't be had and CI isn't set in the environment; else 1.
    """
    try:
        lib = fetch(cache)
        megabytes = sum(jar.stat().st_size for jar in lib.iterdir()) / 2**20
        print(f"Apache Kafka {KAFKA_VERSION}: {megabytes:.0f} MB of jars in {_short(lib)}", flush=True)
        with tempfile.TemporaryDirectory(prefix="pin-kafka-", ignore_cleanup_errors=True) as folder:
            started = time.monotonic()
            with ApacheKafka.start(Path(folder) / "node", lib_dir=lib) as kafka:
                print(f"started in {time.monotonic() - started:.1f} s on {kafka.bootstrap}", flush=True)
                return _try(kafka.bootstrap)
    except KafkaUnavailable as error:
        print(error)
        return 1 if os.environ.get("CI") else 0


def _try(bootstrap: str) -> int:
    created, differences = asyncio.run(ensure_topics(CONTRACTS, KafkaAddress(bootstrap), replicas=1))
    print(f"created {len(created)} topics of the contracts")
    for sentence in differences:
        print(f"drift   {sentence}")
    message = _first_message(load_contracts(CONTRACTS))
    seconds = _there_and_back(bootstrap, message)
    if seconds is None:
        print(f"the example of {message.name} did not come back as it was sent")
        return 1
    print(f"the example of {message.name} went to {message.topic} and back in {seconds * 1000:.0f} ms")
    print("the tests run on it: make test PIN_KAFKA=apache")
    return 1 if differences else 0


def _first_message(contracts: Sequence[Contract]) -> DeclaredMessage:
    return next(message for contract in contracts for message in contract.messages() if message.examples)


def _there_and_back(bootstrap: str, message: DeclaredMessage) -> float | None:
    """Return the seconds that a message's example took to a foreign consumer; None if it came back as another."""
    example = message.examples[0]
    headers, value = example["headers"], orjson.dumps(example["payload"])
    reader = TopicReader(bootstrap, [message.topic])
    started = time.monotonic()
    try:
        producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0})
        producer.produce(message.topic, value, headers["ce_subject"], headers=headers)
        producer.flush(30)
        event = reader.until(bool, seconds=30)[0]
        seconds = time.monotonic() - started
    except AssertionError:
        return None
    finally:
        reader.close()
    same = (event.key, event.headers, event.value) == (headers["ce_subject"], headers, value)
    return seconds if same else None


def _short(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path

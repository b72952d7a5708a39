"""What crm writes, read from the broker by code that no one here wrote: librdkafka, the CloudEvents SDKs for Python and
JavaScript, and kcat. All of them get every declared message whole, or a message fails here."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID, uuid4

import orjson
import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_kafka
from cloudevents.core.formats.json import JSONFormat
from confluent_kafka import Consumer
from contract_checks import unproduced

from chassis.contracts.releases import breaches
from chassis.testing.kafka import Event
from devstack import judge

pytestmark = pytest.mark.messaging
EXTENSIONS = (
    "aggregatetype", "causationid", "contractversion", "correlationid", "eventclass", "sequence", "tenantid",
)  # fmt: skip
"""CloudEvents extensions that travel as `ce_` headers; the trace context travels beside them, as W3C has it."""


@dataclass(frozen=True)
class Seen:
    """An event as some SDK gives it, its time in milliseconds: JavaScript keeps no more."""

    id: str
    source: str
    type: str
    subject: str
    specversion: str
    datacontenttype: str
    time: str
    extensions: dict[str, str]
    data: object


def written_as(headers: dict[str, str], value: bytes) -> Seen:
    """Return what every SDK must see in a record that was written."""
    kept = {name: headers[f"ce_{name}"] for name in EXTENSIONS if f"ce_{name}" in headers}
    plain = [headers[f"ce_{name}"] for name in ("id", "source", "type", "subject", "specversion")]
    return Seen(*plain, headers["content-type"], milliseconds(headers["ce_time"]), kept, json.loads(value))


def milliseconds(moment: str | datetime) -> str:
    moment = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    return moment.astimezone(UTC).isoformat(timespec="milliseconds")


@pytest.fixture
async def read(story, broker, declared) -> list[Event]:
    """The story's records as librdkafka reads them, each once."""
    while (await story.crm.relays[0].run_once()).published:
        pass
    written = {_identity(record.headers) for record in story.records}
    topics = sorted({topic for topic, _ in declared})
    with broker.reading(*topics, from_beginning=True) as reader:
        events = reader.until(lambda seen: written <= {_identity(event.headers) for event in seen})
    return [event for event in events if _identity(event.headers) in written]


def _identity(headers: dict[str, str]) -> tuple[str, str, str | None]:
    """What tells a record of this story from another's: ids of audit records count from 1 in each test's database."""
    return headers["ce_id"], headers["ce_correlationid"], headers.get("ce_tenantid")


@pytest.fixture
def expected(story) -> dict[str, Seen]:
    """What was written, by event id."""
    return {record.headers["ce_id"]: written_as(record.headers, record.value) for record in story.records}


@pytest.mark.req("EVT-102", "EVT-107", "EVT-126")
async def test_librdkafka_reads_every_declared_message_whole(story, read, contracts, declared):
    assert unproduced("crm", {(event.topic, event.type) for event in read}, contracts) == []
    written = {record.headers["ce_id"]: record for record in story.records}
    assert len(read) == len(written)
    for event in read:
        sent = written[event.id]
        assert (event.topic, event.key, event.value) == (sent.topic, sent.key, sent.value)
        assert event.headers.items() >= sent.headers.items()
        assert breaches(declared[event.topic, event.type], event.headers, event.payload) == []
    assert len({event.partition for event in read if event.key == str(story.ended_deal)}) == 1


async def test_a_message_that_the_story_lacks_is_named(read, contracts):
    missing = {(event.topic, event.type) for event in read if event.type != "message.quarantined"}
    assert unproduced("crm", missing, contracts) == [
        "crm.asyncapi.yaml: message MessageQuarantined: no test produces it"
    ]


@pytest.mark.req("EVT-107")
async def test_every_event_can_be_traced_to_what_caused_it(story, read):
    by_type = {event.type: event.headers for event in read}
    assert all(event.headers.get("ce_correlationid") for event in read)
    traced = {event.type for event in read if "traceparent" in event.headers}
    assert traced >= {kind for kind in by_type if kind.startswith("crm.deal.")} | {"pin.crm.timeline-overdue.v1"}
    assert by_type["message.quarantined"]["ce_correlationid"] == "request-1"
    [aside] = [event.payload for event in read if event.type == "message.quarantined"]
    assert UUID(aside["eventId"])
    assert aside["subjectId"] == "unit-1"


async def test_the_python_sdk_reads_what_was_written(read, expected):
    for record in read:
        headers = {name: value.encode() for name, value in record.headers.items()}
        event = from_kafka(KafkaMessage(headers, record.key, record.value), JSONFormat())
        kept = {name: value for name in EXTENSIONS if (value := event.get_extension(name)) is not None}
        seen = Seen(
            event.get_id(),
            event.get_source(),
            event.get_type(),
            event.get_subject(),
            event.get_specversion(),
            event.get_datacontenttype(),
            milliseconds(event.get_time()),
            kept,
            event.get_data(),
        )
        assert seen == expected[record.id]


def in_javascript(records: list[Event]) -> list[Seen]:
    """Return the events that the JavaScript SDK reads; a test without node and npm is skipped."""
    raw = [{"key": event.key, "headers": event.headers, "value": event.value.decode()} for event in records]
    try:
        found = orjson.loads(judge.read_records(orjson.dumps(raw)))
    except judge.NotRun as reason:
        pytest.skip(f"CloudEvents SDK for JavaScript: not run ({reason})")
    fields = ("id", "source", "type", "subject", "specversion", "datacontenttype")
    return [
        Seen(
            *(event[name] for name in fields),
            milliseconds(event["time"]),
            {name: event[name] for name in EXTENSIONS if name in event},
            event["data"],
        )
        for event in found
    ]


async def test_the_javascript_sdk_reads_what_was_written(read, expected):
    assert in_javascript(read) == [expected[event.id] for event in read]


def test_the_javascript_sdk_refuses_a_record_without_its_type():
    headers = {"content-type": "application/json", "ce_specversion": "1.0", "ce_id": "1", "ce_source": "/pin/crm"}
    with pytest.raises(subprocess.CalledProcessError) as caught:
        in_javascript([Event("t", 0, 0, "key", headers, b"{}")])
    assert b"ValidationError" in caught.value.stderr


async def test_kcat_reads_the_overdue_record(read, broker):
    kcat = shutil.which("kcat")
    if kcat is None:
        pytest.skip("kcat: not installed")
    command = [kcat, "-C", "-b", broker.running.bootstrap, "-t", "pin.crm.timeline-overdue.v1", "-e", "-q", "-J"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    headers = [dict(zip(record["headers"][::2], record["headers"][1::2], strict=True)) for record in records]
    wanted = {event.id for event in read if event.topic == "pin.crm.timeline-overdue.v1"}
    assert wanted <= {one["ce_id"] for one in headers}


@pytest.mark.req("TLO-59b", "TLO-59c", "TLO-61b")
async def test_both_consumers_of_the_registry_get_the_overdue_record(story, broker, read, declared):
    message = declared["pin.crm.timeline-overdue.v1", "pin.crm.timeline-overdue.v1"]
    assert len(message.governance["consumers"]) == 2
    for name in message.governance["consumers"]:
        assert _first_of_tenant(broker.running.bootstrap, name, message.topic, str(story.tenant)) == str(
            story.overdue_step
        )


def _first_of_tenant(bootstrap: str, name: str, topic: str, tenant: str) -> str:
    """Return the step that the first record of a tenant speaks of, as a new consumer group of that name reads it."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"pin.{name}.timeline-overdue-{uuid4()}",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])
    try:
        while (record := consumer.poll(30)) is not None:
            assert record.error() is None
            payload = json.loads(record.value())
            if payload["TenantId"] == tenant:
                return payload["TimelineEventId"]
        raise AssertionError(f"{name} got no record of {topic}")
    finally:
        consumer.close()

"""The producer: acknowledged or raised, in order per key, and never stuck, whatever the broker does."""

import asyncio
from collections.abc import AsyncIterator
from uuid import UUID

import pytest
from confluent_kafka import Producer as ForeignProducer
from kafka_proxy import INIT_PRODUCER_ID, PRODUCE, Fate, KafkaProxy, Request, kafka_proxy

from chassis.messaging import (
    BrokerUnavailable,
    KafkaAddress,
    Producer,
    Record,
    RecordRefused,
    TopicSpec,
    create_topics,
    read_topics,
    require_topics,
)
from chassis.messaging.kafka.producer import MAX_BATCH_BYTES, _place
from chassis.outbox import MAX_RECORD_BYTES
from chassis.testing.kafka import Event
from chassis.testing.plugin import TestBroker
from chassis.testing.servers import EmbeddedBroker

pytestmark = pytest.mark.messaging

UNKNOWN_SERVER_ERROR = -1
MESSAGE_TOO_LARGE = 10
OUT_OF_ORDER_SEQUENCE = 45
NOT_ENOUGH_REPLICAS = 19
NOWHERE = KafkaAddress("127.0.0.1:1")


def records(topic: str, count: int, size: int = 10, key: str = "k") -> list[Record]:
    filler = b"x" * size
    return [Record(topic, key.encode(), b"%d " % n + filler, [("ce_id", b"%d" % n)]) for n in range(count)]


def ids(events: list[Event]) -> list[int]:
    return [int(event.id) for event in events]


def read(broker: TestBroker, topic: str, distinct: int) -> list[int]:
    """Return the ids on a topic, in their order, once so many different ones are there."""
    with broker.reading(topic, from_beginning=True) as reader:
        return ids(reader.until(lambda seen: len(set(ids(seen))) >= distinct))


def library_tasks() -> list[str]:
    """Return the names of aiokafka's coroutines that still run."""
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    return [c.__qualname__ for c in coroutines if "aiokafka" in c.cr_code.co_filename]


async def all_ended() -> None:
    """Check that none of them runs on: what is ending gets a few turns of the event loop, and no more."""
    for _ in range(20):
        if not library_tasks():
            return
        await asyncio.sleep(0)
    assert library_tasks() == []


@pytest.fixture
async def proxy(broker: TestBroker) -> AsyncIterator[KafkaProxy]:
    async with kafka_proxy(int(broker.running.bootstrap.rpartition(":")[2])) as running:
        yield running


@pytest.fixture
async def producer(proxy: KafkaProxy) -> AsyncIterator[Producer]:
    """A producer behind the proxy."""
    made = Producer(KafkaAddress(proxy.bootstrap), client_id="test")
    yield made
    await made.close()


def hurry(producer: Producer) -> None:
    """Let a producer wait half a second and no longer for what is not going to come."""
    producer._ack_timeout = 0.5


def be_patient(producer: Producer) -> None:
    """Let a producer wait as long as it does in production."""
    producer._ack_timeout = 10.0


# --- what arrives


async def test_records_arrive_with_key_value_and_headers(broker: TestBroker, topic: str):
    producer = Producer(broker.address, client_id="test")
    headers = [("a", b"1"), ("ce_type", "ж".encode())]
    await producer.publish([Record(topic, "ключ".encode(), b"\x00\xff", headers)])
    await producer.close()
    with broker.reading(topic, from_beginning=True) as reader:
        [event] = reader.until(lambda seen: len(seen) == 1)
    assert (event.key, event.value, event.headers) == ("ключ", b"\x00\xff", {"a": "1", "ce_type": "ж"})


async def test_a_key_goes_to_the_partition_that_other_clients_choose(broker: TestBroker, topic: str):
    """Events of one entity that other systems publish meet ours: librdkafka with the Java client's hash agrees."""
    wide = f"{topic}.wide"
    await create_topics(broker.address, [TopicSpec(wide, 12)])
    keys = ["", "a", "сделка", *(str(UUID(int=n)) for n in range(30))]
    producer = Producer(broker.address, client_id="test")
    await producer.publish([Record(wide, key.encode(), b"ours", []) for key in keys])
    await producer.close()
    foreign = ForeignProducer({"bootstrap.servers": broker.running.bootstrap, "partitioner": "murmur2_random"})
    for key in keys[1:]:
        foreign.produce(wide, b"theirs", key)
    foreign.flush(10)
    with broker.reading(wide, from_beginning=True) as reader:
        events = reader.until(lambda seen: len(seen) == 2 * len(keys) - 1)
    ours = {event.key: event.partition for event in events if event.value == b"ours" and event.key}
    assert len(set(ours.values())) > 6
    assert ours == {event.key: event.partition for event in events if event.value == b"theirs"}


async def test_many_batches_of_one_partition_keep_their_order(broker: TestBroker, topic: str):
    producer = Producer(broker.address, client_id="test")
    await producer.publish(records(topic, 300, size=10_000))
    await producer.close()
    assert read(broker, topic, 300) == list(range(300))


async def test_a_record_of_the_largest_size_is_taken(broker: TestBroker, topic: str):
    producer = Producer(broker.address, client_id="test")
    await producer.publish([*records(topic, 1), *records(topic, 1, size=MAX_RECORD_BYTES), *records(topic, 1)])
    await producer.close()
    assert MAX_RECORD_BYTES > MAX_BATCH_BYTES
    with broker.reading(topic, from_beginning=True) as reader:
        events = reader.until(lambda seen: len(seen) == 3)
    assert [len(event.value) > 1000 for event in events] == [False, True, False]


async def test_publishing_nothing_does_nothing(broker: TestBroker):
    producer = Producer(broker.address, client_id="test")
    await producer.publish([])
    await producer.close()
    await producer.close()


# --- a broker that refuses


@pytest.mark.parametrize("code", [UNKNOWN_SERVER_ERROR, MESSAGE_TOO_LARGE])
async def test_nothing_of_a_partition_is_sent_behind_a_batch_that_was_refused(
    broker: TestBroker, topic: str, proxy: KafkaProxy, producer: Producer, code: int
):
    """A broker that doesn't know the producer yet takes any sequence number: what follows would overtake."""
    passed: list[Request] = []

    def refuse_the_first(request: Request) -> Fate | bytes:
        if request.api != PRODUCE:
            return Fate.PASS
        passed.append(request)
        return request.refusal(code) if len(passed) == 1 else Fate.PASS

    proxy.judge = refuse_the_first
    batches = records(topic, 12, size=MAX_BATCH_BYTES // 2)
    with pytest.raises(RecordRefused if code == MESSAGE_TOO_LARGE else BrokerUnavailable):
        await producer.publish(batches)
    assert len(passed) == 1
    await producer.publish(batches)
    assert read(broker, topic, 12) == list(range(12))


async def test_a_producer_that_is_out_of_sequence_is_replaced_and_what_it_held_is_sent_again(
    broker: TestBroker, topic: str, proxy: KafkaProxy, producer: Producer
):
    """The library repeats a batch that is out of sequence for ever; only another producer id gets it through."""
    stuck: list[object] = []

    def refuse_the_first_client(request: Request) -> Fate | bytes:
        if request.api != PRODUCE or (stuck and producer._client is not stuck[0]):
            return Fate.PASS
        stuck.append(producer._client)
        return request.refusal(OUT_OF_ORDER_SEQUENCE)

    proxy.judge = refuse_the_first_client
    with pytest.raises(BrokerUnavailable):
        await producer.publish(records(topic, 3))
    assert stuck
    await producer.publish(records(topic, 3))
    assert producer._client is not stuck[0]
    assert read(broker, topic, 3) == [0, 1, 2]


async def test_a_refusal_that_passes_is_retried_in_order(
    broker: TestBroker, topic: str, proxy: KafkaProxy, producer: Producer
):
    refusals = iter([True, False, True, True])
    proxy.judge = lambda request: (
        request.refusal(NOT_ENOUGH_REPLICAS) if request.api == PRODUCE and next(refusals, False) else Fate.PASS
    )
    await producer.publish(records(topic, 6, size=MAX_BATCH_BYTES // 2))
    assert read(broker, topic, 6) == list(range(6))


async def test_one_partition_that_fails_stops_and_the_others_arrive(
    broker: TestBroker, topic: str, proxy: KafkaProxy, producer: Producer
):
    wide = f"{topic}.wide"
    await create_topics(broker.address, [TopicSpec(wide, 4)])
    passed: list[Request] = []

    def refuse_a_large_one(request: Request) -> Fate | bytes:
        if request.api != PRODUCE or len(request.frame) < MAX_BATCH_BYTES // 2 or len(request.produced) > 1:
            return Fate.PASS
        passed.append(request)
        return request.refusal(UNKNOWN_SERVER_ERROR)

    proxy.judge = refuse_a_large_one
    large = records(wide, 6, MAX_BATCH_BYTES // 2, "a")
    small = [record for key in "bcdefgh" for record in records(wide, 3, 10, key)]
    assert len({_place(record.key, (0, 1, 2, 3)) for record in small}) > 2
    publication = await producer.deliver([*small, *large])
    assert isinstance(publication.trouble, BrokerUnavailable)
    assert publication.refused == {}
    assert publication.acknowledged >= set(range(len(small)))
    assert len(publication.acknowledged) < len(small) + 6
    assert len(passed) == 1, "nothing follows the batch that failed"
    await all_ended()


# --- a broker that doesn't answer


@pytest.mark.parametrize("fate", [Fate.HANG, Fate.CUT, Fate.SWALLOW_ANSWER], ids=lambda fate: fate.name.lower())
async def test_without_acknowledgement_publish_raises_in_time_and_leaves_no_task_behind(
    topic: str, proxy: KafkaProxy, producer: Producer, fate: Fate
):
    proxy.judge = lambda request: fate if request.api == PRODUCE else Fate.PASS
    await producer.connect()
    hurry(producer)
    with pytest.raises(BrokerUnavailable, match="TimeoutError"):
        async with asyncio.timeout(8):
            await producer.publish(records(topic, 3, size=MAX_BATCH_BYTES // 2))
    await all_ended()


async def test_nothing_is_sent_by_a_producer_that_was_given_up(
    broker: TestBroker, topic: str, proxy: KafkaProxy, producer: Producer
):
    proxy.judge = lambda request: Fate.HANG if request.api == PRODUCE else Fate.PASS
    await producer.connect()
    hurry(producer)
    with pytest.raises(BrokerUnavailable):
        await producer.publish(records(topic, 3))
    be_patient(producer)
    proxy.judge = lambda _: Fate.PASS
    before = proxy.requests[PRODUCE]
    await producer.publish([Record(topic, b"k", b"", [("ce_id", b"99")])])
    assert proxy.requests[PRODUCE] == before + 1
    assert read(broker, topic, 1) == [99]


async def test_an_answer_that_was_lost_is_no_duplicate(
    broker: TestBroker, topic: str, proxy: KafkaProxy, producer: Producer
):
    """The idempotent producer sends again with the same sequence number, and the broker knows it."""
    lost = iter([True])
    proxy.judge = lambda request: Fate.SWALLOW_ANSWER if request.api == PRODUCE and next(lost, False) else Fate.PASS
    await producer.publish(records(topic, 3))
    await producer.publish([Record(topic, b"k", b"", [("ce_id", b"99")])])
    assert read(broker, topic, 4) == [0, 1, 2, 99]


async def test_a_failure_of_one_publish_ends_those_that_share_the_connection(
    topic: str, proxy: KafkaProxy, producer: Producer
):
    proxy.judge = lambda request: Fate.HANG if request.api == PRODUCE else Fate.PASS
    await producer.connect()
    waiting = asyncio.create_task(producer.publish(records(topic, 1)))
    await asyncio.sleep(0)
    hurry(producer)
    with pytest.raises(BrokerUnavailable):
        await producer.publish(records(topic, 1))
    with pytest.raises(BrokerUnavailable):
        async with asyncio.timeout(5):
            await waiting
    await all_ended()


async def test_connecting_to_a_broker_that_gives_no_producer_id_ends_in_time(proxy: KafkaProxy, producer: Producer):
    proxy.judge = lambda request: Fate.CUT if request.api == INIT_PRODUCER_ID else Fate.PASS
    hurry(producer)
    for _ in range(2):
        with pytest.raises(BrokerUnavailable):
            async with asyncio.timeout(8):
                await producer.connect()
    await all_ended()
    be_patient(producer)
    proxy.judge = lambda _: Fate.PASS
    await producer.connect()


async def test_a_cancelled_connect_leaves_no_task_behind(proxy: KafkaProxy, producer: Producer):
    asked = asyncio.Event()

    def hang(request: Request) -> Fate:
        asked.set()
        return Fate.HANG

    proxy.judge = hang
    connecting = asyncio.create_task(producer.connect())
    await asked.wait()
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await all_ended()


async def test_a_broker_that_is_not_there_is_named():
    producer = Producer(NOWHERE, client_id="test")
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
        await producer.connect()
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
        await producer.publish(records("t", 1))
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
        await read_topics(NOWHERE)
    await producer.close()
    await all_ended()


async def test_a_broker_that_restarts_finds_a_new_producer(own_broker: EmbeddedBroker, topic: str):
    address = KafkaAddress(own_broker.bootstrap)
    await create_topics(address, [TopicSpec(topic, 1)])
    producer = Producer(address, client_id="test")
    await producer.publish(records(topic, 2))
    first = producer._client
    own_broker.stop()
    hurry(producer)
    with pytest.raises(BrokerUnavailable):
        await producer.publish(records(topic, 2))
    with pytest.raises(BrokerUnavailable):
        await producer.connect()
    own_broker.resume()
    be_patient(producer)
    await producer.publish(records(topic, 2))
    assert producer._client is not first
    await producer.close()
    await all_ended()


async def test_two_workers_that_connect_at_once_share_one_connection(broker: TestBroker):
    producer = Producer(broker.address, client_id="test")
    await asyncio.gather(*(producer.connect() for _ in range(5)))
    first = producer._client
    await producer.connect()
    assert producer._client is first
    await producer.close()
    await all_ended()


# --- topics


async def test_creating_topics_twice_changes_nothing(broker: TestBroker, topic: str):
    specs = [TopicSpec(f"{topic}.a", 3), TopicSpec(f"{topic}.b", 1)]
    assert await create_topics(broker.address, specs) == [f"{topic}.a", f"{topic}.b"]
    assert await create_topics(broker.address, [*specs, TopicSpec(f"{topic}.a", 9)]) == []
    assert {name: n for name, n in (await read_topics(broker.address)).items() if name.startswith(f"{topic}.")} == {
        f"{topic}.a": 3,
        f"{topic}.b": 1,
    }


async def test_missing_topics_are_named(broker: TestBroker, topic: str):
    await require_topics(broker.address, [topic])
    with pytest.raises(BrokerUnavailable, match=rf"missing topics: {topic}\.a, {topic}\.b"):
        await require_topics(broker.address, [f"{topic}.b", topic, f"{topic}.a"])


def test_tls_verifies_the_broker():
    arguments = KafkaAddress("kafka:9093", "ssl").client_arguments()
    assert arguments["security_protocol"] == "SSL"
    assert arguments["ssl_context"].check_hostname
    assert arguments["ssl_context"].verify_mode.name == "CERT_REQUIRED"

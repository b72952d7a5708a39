"""Topics as the broker has them: their partitions and settings, and their creation."""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, TopicAlreadyExistsError

from chassis.messaging.kafka.causes import not_connected
from chassis.messaging.records import BrokerUnavailable, KafkaAddress, TopicSpec, unavailable

_AUTO_CREATE: Final = "auto.create.topics.enable"


async def read_topics(address: KafkaAddress) -> dict[str, int]:
    """Return the partition count of every topic that the broker has.

    Raises:
        BrokerUnavailable: no broker answers.
    """
    async with Admin(address) as admin:
        described = await admin.describe_topics()
        return {topic["topic"]: len(topic["partitions"]) for topic in described}


async def describe_topics(address: KafkaAddress, settings: Collection[str]) -> dict[str, TopicSpec]:
    """Return every topic that the broker has, as it is.

    Args:
        address: where Kafka is.
        settings: names of the topic settings to ask for; none asks for none.

    Raises:
        BrokerUnavailable: no broker answers.
    """
    async with Admin(address) as admin:
        found = {topic["topic"]: topic["partitions"] for topic in await admin.describe_topics()}
        configs = await _settings(admin, ConfigResourceType.TOPIC, found, settings)
        return {
            name: TopicSpec(
                name,
                len(partitions),
                min((len(partition["replicas"]) for partition in partitions), default=0),
                configs.get(name, {}),
            )
            for name, partitions in found.items()
        }


async def auto_creates_topics(address: KafkaAddress) -> bool:
    """Return whether a broker makes a topic of any name that somebody asks for.

    Raises:
        BrokerUnavailable: no broker answers.
    """
    async with Admin(address) as admin:
        brokers = [str(broker["node_id"]) for broker in (await admin.describe_cluster())["brokers"]]
        configs = await _settings(admin, ConfigResourceType.BROKER, brokers, [_AUTO_CREATE])
        return any(config.get(_AUTO_CREATE) == "true" for config in configs.values())


async def _settings(
    admin: AIOKafkaAdminClient, kind: ConfigResourceType, names: Iterable[str], settings: Collection[str]
) -> dict[str, dict[str, str]]:
    if not settings:
        return {}
    resources = [ConfigResource(kind, name, dict.fromkeys(settings)) for name in names]
    answers = [answer.to_object() for answer in await admin.describe_configs(resources)] if resources else []
    return {
        resource["resource_name"]: {
            entry["config_names"]: entry["config_value"]
            for entry in resource["config_entries"]
            if entry["config_names"] in settings
        }
        for answer in answers
        for resource in answer["resources"]
    }


async def require_topics(address: KafkaAddress, names: Collection[str]) -> None:
    """Check that topics exist.

    Raises:
        BrokerUnavailable: no broker answers, or topics are missing (the text names them).
    """
    missing = sorted(set(names) - set(await read_topics(address)))
    if missing:
        raise BrokerUnavailable(f"missing topics: {', '.join(missing)}")


async def create_topics(address: KafkaAddress, specs: Sequence[TopicSpec]) -> list[str]:
    """Create the topics that don't exist yet and return their names; existing ones are left as they are.

    Raises:
        BrokerUnavailable: no broker answers, or it refuses a topic.
    """
    existing = await read_topics(address)
    created: list[str] = []
    async with Admin(address) as admin:
        for spec in specs:
            if spec.name in existing:
                continue
            topic = NewTopic(spec.name, spec.partitions, spec.replicas, topic_configs=dict(spec.config))
            response = await admin.create_topics([topic])
            for name, code, *reason in response.topic_errors:
                if code == 0:
                    created.append(name)
                elif code != TopicAlreadyExistsError.errno:
                    raise BrokerUnavailable(f"topic {name} was refused: error {code} {reason}")
    return created


class Admin:
    """An administration connection for the length of a block."""

    def __init__(self, address: KafkaAddress) -> None:
        self._address = address
        self._client = AIOKafkaAdminClient(**address.client_arguments())

    async def __aenter__(self) -> AIOKafkaAdminClient:
        try:
            await self._client.start()
        except (KafkaError, OSError) as error:
            await self._client.close()
            raise await not_connected(self._address, error) from error
        return self._client

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        await self._client.close()
        if isinstance(error, KafkaError):
            raise unavailable(self._address, error) from error

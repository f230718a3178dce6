"""What serves the vhosts of one log directory: the broker, and the doors' insides. Driver: part of the composition.

A node alone has one of them, for as long as it runs. A node of a cluster has one for each shard that it leads, from
its election until it steps down. What all of them share (users and their rights, limits, alarms, the words of the
protocols) is `Commons`. Neighbours: node.py opens the listeners.
"""

from copy import copy
from dataclasses import dataclass
from functools import partial

import trio

from headrace import __version__
from headrace.config import Config
from headrace.controller.metadata import Metadata
from headrace.core_log.directory import LogDirectory
from headrace.core_log.env import Env
from headrace.core_log.record import Protocol as Vocabulary
from headrace.gateways.amqp.deaths import aparts, mark, stamp
from headrace.gateways.amqp.delaying import fired
from headrace.gateways.amqp.properties import routing_fields
from headrace.gateways.amqp.server import AmqpDoor
from headrace.gateways.amqp.settings import settings_of
from headrace.gateways.connected import OpenConnections, mqtt_counts, retained
from headrace.gateways.delivery.access import Access
from headrace.gateways.delivery.alarms import Alarms
from headrace.gateways.delivery.authentication import Authentication
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.consumer_groups_coordinator import GroupCoordinator
from headrace.gateways.delivery.consumer_groups_topics import GroupTopics
from headrace.gateways.delivery.cursors import Cursors
from headrace.gateways.delivery.delayed_duty import DutyKind
from headrace.gateways.delivery.delayed_publish import DelayedPublishes
from headrace.gateways.delivery.delayed_topics import DelayedTopics
from headrace.gateways.delivery.limits import Limits
from headrace.gateways.delivery.meter import SystemMeter, Watch
from headrace.gateways.delivery.read_leases import ReadLeases
from headrace.gateways.delivery.schedules import Schedules
from headrace.gateways.delivery.staging import Staging
from headrace.gateways.delivery.topics import Topics
from headrace.gateways.delivery.turn import Turn
from headrace.gateways.http.server import HttpDoor
from headrace.gateways.mapping import PropertyMapping
from headrace.gateways.mqtt.delaying import FiredWords
from headrace.gateways.mqtt.properties import with_user_properties
from headrace.gateways.mqtt.routingkeys import RoutingKeys
from headrace.gateways.mqtt.server import MqttDoor
from headrace.gateways.plain import PlainWords, restated


class Commons:
    """What every service of a node uses, and the listeners too."""

    def __init__(self, config: Config, env: Env, metadata: Metadata, hashing: trio.CapacityLimiter) -> None:
        self.config = config
        self.env = env
        self.metadata = metadata
        self.limits = Limits(metadata.snapshot, config.limits.values())
        self.access = Access(metadata.snapshot)
        metadata.listen(lambda snapshot, changes: self.access.update(snapshot))
        metadata.listen(lambda snapshot, changes: self.limits.update(snapshot))
        self.authentication = Authentication(
            metadata, key=env.ids.uuid().bytes + env.ids.uuid().bytes, monotonic=env.clock.monotonic, hashing=hashing
        )
        self.watch = Watch(Alarms(config.alarms.values()), SystemMeter(config.node.data), env)
        self.keys = RoutingKeys(lossy=config.mqtt.lossy_topics)
        self.mapping = PropertyMapping(self.keys)

    def part(self, env: Env, metadata: Metadata, watch: Watch) -> "Commons":
        """The same for one shard of a cluster, which has a storage of its own and comes and goes."""
        found = copy(self)
        found.env, found.metadata, found.watch = env, metadata, watch
        return found


@dataclass(frozen=True, slots=True)
class Service:
    broker: Broker
    amqp: AmqpDoor
    mqtt: MqttDoor
    http: HttpDoor

    async def dismiss(self, reason: str) -> None:
        """Another node serves these vhosts from now on: who is connected here is told to come again."""
        await self.amqp.step_down(reason)
        await self.mqtt.step_down(reason)
        await self.http.step_down()

    async def close(self) -> None:
        """Everything settled is safe when this returns."""
        await self.mqtt.close()
        await self.http.groups.close()
        await self.broker.close()


async def open_service(commons: Commons, log: LogDirectory, nursery: trio.Nursery, *, clean: bool) -> Service:
    """Load what the log directory holds, and begin to serve it. `clean`: nothing was delivered that is not known."""
    config, env, metadata, limits = commons.config, commons.env, commons.metadata, commons.limits
    access, authentication, watch, keys = commons.access, commons.authentication, commons.watch, commons.keys
    broker = Broker(
        env,
        log,
        metadata,
        settings_of=settings_of,
        stamp=stamp,
        clean=clean,
        log_config=config.storage.stream_defaults(),
        release_bytes_min=config.storage.release_bytes,
        delay=config.delay.values(),
        fields_of=routing_fields,
        restate=commons.mapping.to_amqp,
    )
    broker.queues_max = limits.queues_max
    publishes = DelayedPublishes(broker, {Vocabulary.AMQP: fired})
    broker.delayed.carry(DutyKind.PUBLISH, publishes)
    broker.transfers.marks = {Vocabulary.AMQP: mark, Vocabulary.MQTT_5: with_user_properties}
    broker.redrives.aparts = {Vocabulary.AMQP: aparts}
    schedules = Schedules(broker, publishes)
    turn = Turn(broker)
    mqtt = MqttDoor(
        broker,
        turn,
        access,
        authentication,
        limits,
        watch,
        keys=keys,
        to_mqtt=commons.mapping.to_mqtt,
        config=config.mqtt.door(),
        version=f"headrace version {__version__}",
    )
    for vocabulary in (Vocabulary.MQTT_3, Vocabulary.MQTT_5):
        publishes.words[vocabulary] = FiredWords(broker, mqtt.scans)
    topics = Topics(broker)
    broker.delayed.carry(DutyKind.TOPIC, DelayedTopics(broker, topics))
    await topics.load()
    cursors = Cursors(broker)
    read_leases = ReadLeases(broker, config.leases.values())
    staging = Staging(broker, topics, config.staging.values())
    group_topics = GroupTopics(broker, topics)
    groups = GroupCoordinator(broker, group_topics.logs_of, config.groups.values())
    groups.retries.restate = restated
    await broker.load()
    await groups.load()
    await staging.load()
    await cursors.load()
    await read_leases.load()
    broker.follow_metadata()
    mqtt.load()
    schedules.load()
    metadata.listen(schedules.metadata_changed)
    nursery.start_soon(broker.run)
    nursery.start_soon(schedules.run)
    nursery.start_soon(topics.run)
    nursery.start_soon(groups.run)
    nursery.start_soon(staging.run)
    nursery.start_soon(read_leases.run)
    nursery.start_soon(mqtt.run)
    amqp = AmqpDoor(broker, turn, access, authentication, limits, watch, config.amqp.door())
    nursery.start_soon(amqp.run)
    http = HttpDoor(
        broker,
        turn,
        access,
        authentication,
        limits,
        watch,
        topics=topics,
        groups=groups,
        group_topics=group_topics,
        schedules=schedules,
        staging=staging,
        cursors=cursors,
        read_leases=read_leases,
        words=PlainWords(keys),
        open_connections=OpenConnections(amqp, mqtt),
        config=config.http.door(),
        version=__version__,
    )
    http.mqtt_counts = lambda: mqtt_counts(mqtt)
    http.retained = partial(retained, mqtt)
    return Service(broker, amqp, mqtt, http)

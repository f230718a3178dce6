"""One node of a cluster, from lock to clean stop. Driver: the composition root of `headrace serve --cluster`.

    lock -> identity, life -> what it kept -> peer door -> its replicas -> registered -> doors open -> ready
         -> stop asked -> doors drain -> what it leads is closed -> clean -> unlock

Every door of it takes any client; what it leads is served here, the rest is passed on to who leads it. Stopping hands
nothing over by itself: when its links end the others elect at once who leads instead. Neighbours: node.py is a node
alone, shards.py has its replicas, controller/cluster.py its part in the cluster.
"""

import logging
import ssl
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from headrace import __version__
from headrace.config import Config
from headrace.controller.cluster import PEER, ClusterAgent
from headrace.controller.cluster_config import ClusterConfig
from headrace.controller.entities import Endpoint
from headrace.controller.metadata import HASHING_THREADS_MAX
from headrace.controller.postgres_store import PostgresStore
from headrace.controller.store import MetaStore
from headrace.core_log.env import Env
from headrace.core_log.errors import DiskFull, Refused, StorageError
from headrace.core_log.peer.door import PeerDoor
from headrace.core_log.peer.frames import Hello, Purpose
from headrace.core_log.peer.link import Peers
from headrace.core_log.peer.secret import check_secret
from headrace.core_log.replication.assignment import Member
from headrace.core_log.replication.config import ReplicationConfig
from headrace.core_log.storage.contract import Storage
from headrace.core_log.storage.disk import DiskStorage
from headrace.definitions import has_real_user
from headrace.exits import DoorNotOpened
from headrace.gateways.amqp.front import AmqpFront, AmqpFrontListener
from headrace.gateways.delivery.listener import DoorListener
from headrace.gateways.http.front import HttpFront, HttpFrontListener
from headrace.gateways.http.node_app import NodeDoor
from headrace.gateways.mqtt.front import MqttFront, MqttFrontListener
from headrace.kinds import Address
from headrace.node import (
    CLEAN,
    HOLDERS_NAMED,
    Delivery,
    Door,
    Listening,
    Reload,
    check_exposure,
    collect_garbage,
    definition_problems,
    load_tls,
    nothing_to_reload,
    open_identity,
    take_clean_marker,
)
from headrace.service import Commons
from headrace.settings import ConfigError
from headrace.shards import Shards

INCARNATION = "incarnation"
NONCE_BYTES = 32

_log = logging.getLogger(__name__)

OpenStore = Callable[[], MetaStore]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a test has in other ways: the store of the metadata, folders, and how long nodes wait for each other."""

    open_store: OpenStore
    storage_of: Callable[[str], Storage]
    timing: ClusterConfig


def surroundings(config: Config, env: Env) -> Surroundings:
    cluster = config.cluster
    return Surroundings(
        lambda: PostgresStore(cluster.store, new_uuid=env.ids.uuid),
        lambda folder: DiskStorage(config.node.data / folder, handles_max=config.storage.handles_max),
        ClusterConfig(shards=cluster.shards, replicas=cluster.replicas, min_isr=cluster.min_in_sync),
    )


async def run_cluster_node(
    config: Config,
    env: Env,
    *,
    stop: trio.Event,
    reload: Reload | None = None,
    tune_process: bool = True,
    around: Surroundings | None = None,
    opened: Callable[[Shards, ClusterAgent], None] = lambda shards, agent: None,
    task_status: trio.TaskStatus[Mapping[str, Address]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `stop` is set, then drain and return. Started = registered, and every open door accepts.

    Raises what a log raises when its disk can no longer be trusted, or when its records contradict its leader's.
    """
    around = around or surroundings(config, env)
    secret = await env.worker.run(lambda: read_secret(config.cluster.secret_file))
    await env.worker.run(env.storage.lock)
    try:
        identity = await env.worker.run(lambda: open_identity(env))
        clean = await env.worker.run(lambda: take_clean_marker(env))
        incarnation = await env.worker.run(lambda: next_incarnation(env))
        member = Member(config.cluster.node_id, incarnation, identity.disk)
        _log.info("data directory opened", extra={"node": member.node, "incarnation": incarnation, "clean": clean})
        node = _Node(config, env, around, member, secret, clean=clean)
        await node.agent.open()
        async with trio.open_nursery() as nursery:
            if tune_process:
                nursery.start_soon(collect_garbage, env)
            await node.open(nursery)
            opened(node.shards, node.agent)
            if reload is not None:
                reload.apply = node.reload
            await node.serve(stop, task_status)
            if reload is not None:
                reload.apply = nothing_to_reload
            await node.shards.close()
            nursery.cancel_scope.cancel()
        await env.worker.run(lambda: env.storage.replace_file(CLEAN, b""))
        _log.info("stopped clean")
    finally:
        env.storage.unlock()


class _Node:
    def __init__(
        self, config: Config, env: Env, around: Surroundings, member: Member, secret: bytes, *, clean: bool
    ) -> None:
        self._config = config
        self._env = env
        self._tls = load_tls(config)
        cluster = config.cluster
        nonce = lambda: b"".join(env.ids.uuid().bytes for _ in range(NONCE_BYTES // 16))  # noqa: E731
        caller, door = _peer_contexts(config)
        self.peers = Peers(self._me, secret, nonce, tls=caller)
        self.shards = Shards(
            env,
            around.storage_of,
            member,
            clean=clean,
            directory=config.storage.directory(),
            replication=ReplicationConfig(lag_s=cluster.lag_seconds, throttle_bytes_s=cluster.catch_up_bytes),
            patience_s=cluster.patience_seconds,
        )
        hashing = trio.CapacityLimiter(HASHING_THREADS_MAX)
        self.agent = ClusterAgent(
            env,
            member,
            around.open_store,
            self.peers,
            self.shards,
            # What was confirmed was synced first, unless somebody chose otherwise.
            clean=clean or config.storage.durability == "sync",
            config=around.timing,
            hashing=hashing,
            noted=_log.warning,
        )
        self._hashing = hashing
        self.shards.agent, self.shards.peers = self.agent, self.peers
        self._member = member
        self._peer_door = PeerDoor(
            self._me,
            secret,
            nonce,
            {
                Purpose.CONTROL: self.agent.handle,
                Purpose.FETCH: self.shards.serve_fetch,
                Purpose.RELAY: self.shards.answers.handle,
            },
            tls=door,
        )
        self._endpoints: dict[str, Endpoint] = {}
        self._doors: list[Door] = []
        self._bound: dict[str, Address] = {}
        self._commons: Commons

    def _me(self) -> Hello:
        member = self._member
        return Hello(self.agent.cluster, member.node, member.incarnation, member.disk, Purpose.CONTROL)

    async def open(self, nursery: trio.Nursery) -> None:
        """Until this node is registered, and its doors can take clients."""
        config, env = self._config, self._env
        commons = self._commons = self.shards.commons = Commons(config, env, self.agent.metadata, self._hashing)
        commons.watch.holders = self._holders
        address = config.doors.peer
        if address is None:
            raise ConfigError(["doors.peer: missing; other nodes of the cluster connect there"])
        self._bound[PEER] = await _opened(PEER, address, self._open_peer_door)
        nursery.start_soon(self._peer_door.serve)
        listeners = self._listeners(nursery)
        doors = [Listening(one) for one in listeners]
        for one in doors:
            where: Address | None = getattr(config.doors, one.name)
            if where is not None:
                self._bound[one.name] = await _opened(one.name, where, one.open)
                self._doors.append(one)
        await nursery.start(self.shards.run)
        host, _, port = config.cluster.advertise.partition(":")
        endpoints = {name: Endpoint(host or where.host, where.port) for name, where in self._bound.items()}
        if port:
            endpoints[PEER] = Endpoint(host, int(port))
        await nursery.start(self.agent.run, endpoints)
        if wrong := definition_problems(config, self.agent.metadata.snapshot):
            raise ConfigError(wrong)
        await self.agent.metadata.seed(config.definitions)
        guarded = lambda: has_real_user(self.agent.metadata.snapshot)  # noqa: E731
        await check_exposure(config, Delivery(doors, trio.lowlevel.checkpoint, is_guarded=guarded))
        await commons.watch.look()
        nursery.start_soon(commons.watch.run)

    async def _open_peer_door(self, address: Address) -> Address:
        return Address(*await self._peer_door.open(address.host, address.port))

    def _listeners(self, nursery: trio.Nursery) -> Sequence[DoorListener]:
        commons, config, env, tls = self._commons, self._config, self._env, self._tls
        limits, alarms, metadata = commons.limits, commons.watch.alarms, self.agent.metadata
        amqp = AmqpFront(
            self.shards,
            env,
            commons.access,
            commons.authentication,
            limits,
            alarms,
            has_vhost=lambda name: name in metadata.snapshot.vhosts,
            config=config.amqp.door(),
        )
        nursery.start_soon(amqp.run)
        self.shards.moved.append(amqp.moved)
        mqtt = MqttFront(
            self.shards,
            env.clock,
            limits,
            alarms,
            users=lambda: metadata.snapshot.users,
            config=config.mqtt.door(),
        )
        self.shards.moved.append(mqtt.moved)
        node = NodeDoor(
            self.agent,
            commons.access,
            commons.authentication,
            alarms,
            metadata_version=lambda: metadata.snapshot.version,
            statuses=self.shards.statuses,
            served=lambda: [(number, service.http) for number, service in self.shards.services()],
            config=config.http.door(),
            version=__version__,
        )
        http = HttpFront(self.shards, env, limits, alarms, node.app, config=config.http.door())
        found: list[DoorListener] = [
            AmqpFrontListener("amqp", amqp),
            MqttFrontListener("mqtt", mqtt),
            MqttFrontListener("ws", mqtt, websocket=True),
            HttpFrontListener("http", http),
        ]
        if tls is not None:
            found += [
                AmqpFrontListener("amqps", amqp, tls),
                MqttFrontListener("mqtts", mqtt, tls),
                MqttFrontListener("wss", mqtt, tls, websocket=True),
                HttpFrontListener("https", http, tls),
            ]
        return found

    def _holders(self) -> Sequence[tuple[int, str, str]]:
        found = [
            one for _number, service in self.shards.services() for one in service.broker.largest_holders(HOLDERS_NAMED)
        ]
        return sorted(found, reverse=True)[:HOLDERS_NAMED]

    async def serve(self, stop: trio.Event, task_status: trio.TaskStatus[Mapping[str, Address]]) -> None:
        """Until a stop is asked for and clients have had their time to go. Peers are served to the end."""
        async with trio.open_nursery() as nursery:
            for door in self._doors:
                nursery.start_soon(door.serve)
            task_status.started(self._bound)
            await stop.wait()
            seconds = self._config.node.drain_seconds
            _log.info("draining", extra={"doors": sorted(self._bound), "seconds": seconds})
            with trio.move_on_after(seconds) as patience:
                async with trio.open_nursery() as draining:
                    for door in self._doors:
                        draining.start_soon(door.drain)
            if patience.cancelled_caught:
                _log.warning("clients were still connected when the time to drain was over")
            nursery.cancel_scope.cancel()

    async def reload(self, new: Config) -> Sequence[str]:
        """All of it is looked at before any of it counts."""
        try:
            new_tls = load_tls(new)
        except ConfigError as error:
            return error.problems
        if wrong := definition_problems(new, self.agent.metadata.snapshot):
            return wrong
        try:
            await self.agent.metadata.seed(new.definitions)
        except (Refused, DiskFull) as error:
            return [f"{new.file}: {error}"]
        self._commons.limits.config = new.limits.values()
        self._commons.watch.alarms.config = new.alarms.values()
        if self._tls is not None and new_tls is not None:
            self._tls.context, self._tls.name_from = new_tls.context, new_tls.name_from
        elif self._tls is not new_tls:
            _log.warning("TLS doors open or close at the next start")
        return ()


async def _opened(name: str, address: Address, door: Callable[[Address], Awaitable[Address]]) -> Address:
    try:
        return await door(address)
    except OSError as error:
        raise DoorNotOpened(f"{name} door: cannot listen on {address}: {error.strerror}") from error


def read_secret(path: Path | None) -> bytes:
    """ConfigError for one that is no secret: too short, or for everybody to read."""
    assert path is not None, "looked at when the configuration was loaded"
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError([f"cluster.secret_file: {path} can be read by others: chmod 600 it"])
        return check_secret(path.read_bytes().strip())
    except OSError as error:
        raise ConfigError([f"cluster.secret_file: {path}: {error.strerror}"]) from error
    except (ValueError, Refused) as error:
        raise ConfigError([f"cluster.secret_file: {path}: {error}"]) from error


def next_incarnation(env: Env) -> int:
    """Which life of this node begins now; kept before it does anything. Not counted from 1: a node whose disk came back
    empty must not take up the number of an earlier life, which orders and rows may still name (C4), nor two nodes the
    same, which would make their ballots one (C7)."""
    storage = env.storage
    try:
        before = int(storage.read_file(INCARNATION)) if storage.exists(INCARNATION) else 0
    except ValueError as error:
        raise StorageError(f"{INCARNATION}: cannot be read: {error}") from error
    incarnation = max(before + 1, env.clock.wall_us())
    storage.replace_file(INCARNATION, f"{incarnation}\n".encode())
    return incarnation


def _peer_contexts(config: Config) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """For connecting to others, and for others who connect: both sides show a certificate, and look at the other's."""
    if not config.cluster.peer_tls:
        return None, None
    tls = config.tls
    if tls.certificate is None or tls.key is None or tls.client_ca is None:
        raise ConfigError(["cluster.peer_tls: needs tls.certificate, tls.key and tls.client_ca"])
    try:
        found = []
        for purpose in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
            context = ssl.SSLContext(purpose)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_cert_chain(tls.certificate, tls.key)
            context.load_verify_locations(tls.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
            found.append(context)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError([f"cluster.peer_tls: {error}"]) from error
    return found[0], found[1]

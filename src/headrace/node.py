"""One broker node, from lock to clean stop. Driver: the composition root.

    lock the data directory -> identity -> log -> doors open -> ready -> stop asked -> doors drain -> clean -> unlock

The clean-shutdown marker is taken away before anything is opened and written only after everything is closed, so a
node that died in between is known as unclean. Cancelling `run_node` is not a stop: it leaves what a crash would leave.
Neighbours: commands/serve.py runs it under signals; service.py makes what stands behind the doors; each listener comes
in as one line of `open_delivery`; cluster_node.py is the same for a node of a cluster.
"""

import gc
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Protocol
from uuid import UUID

import trio

from headrace.config import Config
from headrace.controller.metadata import HASHING_THREADS_MAX
from headrace.controller.service import MetadataService
from headrace.controller.snapshot import Snapshot
from headrace.core_log.directory import LogDirectory
from headrace.core_log.env import Env
from headrace.core_log.errors import DiskFull, Refused, StorageError, UnknownFormat
from headrace.definitions import has_real_user, problems
from headrace.exits import DoorNotOpened
from headrace.gateways.amqp.server import AmqpListener
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.listener import DoorListener, TlsSide, is_loopback, resolve
from headrace.gateways.delivery.tls import TlsError, load_context
from headrace.gateways.http.server import HttpListener
from headrace.gateways.mqtt.server import MqttListener
from headrace.kinds import Address
from headrace.recovery import RecoveringStore, adopt_streams
from headrace.service import Commons, open_service
from headrace.settings import ConfigError

IDENTITY = "node.json"
CLEAN = "clean"
FORMAT = 1
GARBAGE_PERIOD_S = 600
GARBAGE_THRESHOLDS = (2_000, 4, 1_000_000)
# So many queues are named when the disk is full.
HOLDERS_NAMED = 5
# Any of these without node.json is a directory that lost its identity, or never had one: not ours to adopt.
_KEPT = ("streams", "trash", "journal", "views", "meta.sqlite", CLEAN)

_log = logging.getLogger(__name__)


class Door(Protocol):
    """One listener of one protocol."""

    name: str

    async def open(self, address: Address) -> Address:
        """Bind and listen, so that connections are accepted from now on; returns where. OSError if that fails."""

    async def serve(self) -> None:
        """Serve connections; returns once drained."""

    async def drain(self) -> None:
        """Accept nothing more, let clients finish what is under way. Cancelled when the time for it is over."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which node this is, and which disk: a copied or emptied directory must never pass for the old one."""

    node: UUID
    disk: UUID


@dataclass(slots=True)
class Delivery:
    """What serves clients: the broker and its doors. `close` makes everything settled safe; `reload` takes up a new
    configuration, or says what is wrong with it and changes nothing."""

    doors: Sequence[Door]
    close: Callable[[], Awaitable[None]]
    reload: Callable[[Config], Awaitable[Sequence[str]]] = field(default_factory=lambda: nothing_to_reload)
    # False until somebody besides guest can log in: then no door may be open to other machines.
    is_guarded: Callable[[], bool] = lambda: True
    broker: Broker | None = None


async def nothing_to_reload(config: Config) -> Sequence[str]:
    await trio.lowlevel.checkpoint()
    return ()


class Reload:
    """How a running node is told of a new configuration; before it runs and after, nothing is told."""

    def __init__(self) -> None:
        self.apply: Callable[[Config], Awaitable[Sequence[str]]] = nothing_to_reload


async def open_delivery(
    config: Config, env: Env, log: LogDirectory, clean: bool, nursery: trio.Nursery, *, recover_metadata: bool = False
) -> Delivery:
    """Metadata, views, doors: every door this release has; which of them open is the configuration's affair.

    `recover_metadata`: go on with metadata that are older than the log, and lose no stream by that.
    """
    tls = load_tls(config)
    for name in ("amqps", "mqtts", "wss", "https"):
        if tls is None and getattr(config.doors, name) is not None:
            _log.warning("the %s door stays closed: it needs tls.certificate and tls.key", name)
    hashing = trio.CapacityLimiter(HASHING_THREADS_MAX)
    store = RecoveringStore(config.node.data / "meta.sqlite", env.ids.uuid, allowed=recover_metadata)
    metadata = MetadataService(
        store.open,
        new_uuid=env.ids.uuid,
        hashing=hashing,
    )
    await nursery.start(metadata.run)
    if wrong := definition_problems(config, metadata.snapshot):
        raise ConfigError(wrong)
    await metadata.seed(config.definitions)
    if store.recovered:
        await adopt_streams(log, metadata)
    commons = Commons(config, env, metadata, hashing)
    watch = commons.watch
    service = await open_service(commons, log, nursery, clean=clean)
    broker, amqp, mqtt, http = service.broker, service.amqp, service.mqtt, service.http
    watch.holders = lambda: broker.largest_holders(HOLDERS_NAMED)
    await watch.look()
    nursery.start_soon(watch.run)
    listeners: list[DoorListener] = [
        AmqpListener("amqp", amqp),
        MqttListener("mqtt", mqtt),
        MqttListener("ws", mqtt, websocket=True),
        HttpListener("http", http),
    ]
    if tls is not None:
        listeners += [
            AmqpListener("amqps", amqp, tls),
            MqttListener("mqtts", mqtt, tls),
            MqttListener("wss", mqtt, tls, websocket=True),
            HttpListener("https", http, tls),
        ]
    http.listeners = listeners

    async def reload(new: Config) -> Sequence[str]:
        """All of it is looked at before any of it counts."""
        try:
            new_tls = load_tls(new)
        except ConfigError as error:
            return error.problems
        if wrong := definition_problems(new, metadata.snapshot):
            return wrong
        try:
            await metadata.seed(new.definitions)
        except (Refused, DiskFull) as error:
            return [f"{new.file}: {error}"]
        commons.limits.config = new.limits.values()
        watch.alarms.config = new.alarms.values()
        if tls is not None and new_tls is not None:
            tls.context, tls.name_from = new_tls.context, new_tls.name_from
        elif tls is not new_tls:
            _log.warning("TLS doors open or close at the next start")
        return ()

    seen = [Listening(one) for one in listeners]
    return Delivery(seen, service.close, reload, lambda: has_real_user(metadata.snapshot), broker)


def load_tls(config: Config) -> TlsSide | None:
    try:
        wanted = config.tls.doors()
        return None if wanted is None else TlsSide(load_context(wanted), wanted.name_from)
    except TlsError as error:
        raise ConfigError([f"tls: {error}"]) from error


def definition_problems(config: Config, snapshot: Snapshot) -> list[str]:
    return [f"{config.file}: {problem}" for problem in problems(config.definitions, snapshot)]


class Listening:
    """A listener behind the node's idea of a door."""

    def __init__(self, listener: DoorListener) -> None:
        self.name = listener.name
        self._listener = listener
        self.serve = listener.serve
        self.drain = listener.drain

    async def open(self, address: Address) -> Address:
        return Address(*await self._listener.open(address.host, address.port))


async def run_node(
    config: Config,
    env: Env,
    *,
    stop: trio.Event,
    reload: Reload | None = None,
    doors: Callable[[Config, LogDirectory], Sequence[Door]] | None = None,
    tune_process: bool = True,
    opened: Callable[[Delivery], None] = lambda delivery: None,
    recover_metadata: bool = False,
    task_status: trio.TaskStatus[Mapping[str, Address]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `stop` is set, then drain and return. Started = every open door accepts; its value is where.

    `tune_process`: the process is the broker's own, and its collector of garbage is set up for it. `opened` is told
    what serves clients, before anybody is served. `recover_metadata`: as for `open_delivery`.

    Raises what the log raises when the disk can no longer be trusted; the directory then counts as unclean.
    """
    await env.worker.run(env.storage.lock)
    try:
        identity = await env.worker.run(lambda: open_identity(env))
        clean = await env.worker.run(lambda: take_clean_marker(env))
        log = await LogDirectory.open(env, config.storage.directory(), clean=clean)
        told = {"clean": clean, "streams": len(log.streams), "replayed": log.replayed_count}
        _log.info("data directory opened", extra={**_texts(identity), **told})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log.run)
            if tune_process:
                nursery.start_soon(collect_garbage, env)
            if doors is None:
                delivery = await open_delivery(config, env, log, clean, nursery, recover_metadata=recover_metadata)
            else:
                delivery = Delivery(doors(config, log), trio.lowlevel.checkpoint)
            opened(delivery)
            await check_exposure(config, delivery)
            if reload is not None:
                reload.apply = delivery.reload
            await _serve_doors(config, delivery.doors, stop, task_status)
            if reload is not None:
                reload.apply = nothing_to_reload
            await delivery.close()
            await log.close()
            nursery.cancel_scope.cancel()
        await env.worker.run(lambda: env.storage.replace_file(CLEAN, b""))
        _log.info("stopped clean")
    finally:
        env.storage.unlock()


async def collect_garbage(env: Env) -> None:
    """Keep the cycle collector from stopping the loop.

    Batches are long lists of bytes, and a full collection walks all of them: 60 ms at the 99th percentile of A5-5k,
    against 0.5 without (bench/amqp_throughput.py). Hardly anything here is a cycle, so the old generation is left
    alone but for one collection in ten minutes. The younger ones are small: with 20 x 20,000 objects the second took
    100 ms, with 4 x 5,000 up to 13 of a busy machine (bench/delay.py), and with 4 x 2,000 a third of that, for the same
    cost in all.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    while True:
        await env.clock.sleep(GARBAGE_PERIOD_S)
        gc.collect()


async def check_exposure(config: Config, delivery: Delivery) -> None:
    """No door is open to other machines while guest, whose password everybody knows, is the only user."""
    if delivery.is_guarded():
        return
    exposed: list[str] = []
    for door in delivery.doors:
        address: Address | None = getattr(config.doors, door.name)
        if address is None:
            continue
        try:
            found = await resolve(address.host, address.port)
        except OSError:
            continue  # it will not open
        if not all(is_loopback(where[4][0]) for where in found):
            exposed.append(
                f"doors.{door.name}: {address} can be reached from other machines, and guest is the only user: "
                "define another in [[users]] first"
            )
    if exposed:
        raise ConfigError(exposed)


async def _serve_doors(
    config: Config, doors: Sequence[Door], stop: trio.Event, task_status: trio.TaskStatus[Mapping[str, Address]]
) -> None:
    built = {door.name for door in doors}
    if absent := [one.name for one in fields(config.doors) if one.name not in built]:
        _log.info(
            "doors that this release does not have yet, or TLS doors without [tls], stay closed",
            extra={"doors": absent},
        )
    bound: dict[str, Address] = {}
    opened: list[Door] = []
    async with trio.open_nursery() as nursery:
        for door in doors:
            address: Address | None = getattr(config.doors, door.name)
            if address is None:
                continue
            try:
                bound[door.name] = await door.open(address)
            except OSError as error:
                raise DoorNotOpened(f"{door.name} door: cannot listen on {address}: {error.strerror}") from error
            opened.append(door)
            nursery.start_soon(door.serve)
        task_status.started(bound)
        await stop.wait()
        _log.info("draining", extra={"doors": sorted(bound), "seconds": config.node.drain_seconds})
        with trio.move_on_after(config.node.drain_seconds) as patience:
            async with trio.open_nursery() as draining:
                for door in opened:
                    draining.start_soon(door.drain)
        if patience.cancelled_caught:
            _log.warning("clients were still connected when the time to drain was over")
        nursery.cancel_scope.cancel()


def open_identity(env: Env) -> Identity:
    """The identity of this data directory; an empty directory gets a new one."""
    storage = env.storage
    if storage.exists(IDENTITY):
        return decode_identity(storage.read_file(IDENTITY))
    for name in _KEPT:
        if storage.exists(name):
            raise StorageError(f"{IDENTITY} is missing though {name} is there: not a data directory, or a damaged one")
    identity = Identity(node=env.ids.uuid(), disk=env.ids.uuid())
    storage.replace_file(IDENTITY, encode_identity(identity))
    return identity


def take_clean_marker(env: Env) -> bool:
    """Whether the last stop was clean. From here on, until the next clean stop, this directory counts as unclean."""
    if not env.storage.exists(CLEAN):
        return False
    env.storage.remove(CLEAN)
    env.storage.sync_dir("")
    return True


def encode_identity(identity: Identity) -> bytes:
    return json.dumps({"format": FORMAT, **_texts(identity)}, indent=2).encode() + b"\n"


def decode_identity(data: bytes) -> Identity:
    try:
        found = json.loads(data)
        format_found = found["format"]
        if format_found != FORMAT:
            raise UnknownFormat(f"{IDENTITY}: this release reads format {FORMAT}, the directory has {format_found!r}")
        return Identity(node=UUID(found["node"]), disk=UUID(found["disk"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{IDENTITY}: cannot be read: {error!r}") from error


def _texts(identity: Identity) -> dict[str, str]:
    return {name: str(value) for name, value in asdict(identity).items()}

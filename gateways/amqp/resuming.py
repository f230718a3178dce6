"""How a new leader goes on with an AMQP connection that another one served. Driver, through operations.py.

The client is told nothing that it knows: no answer is sent, consumers have their tags, delivery tags count on. What
cannot be had again is told: a consumer whose queue is gone, or whose place in a stream nobody knows, is cancelled.
A reader that said where to begin goes on behind what it was given last.
Neighbours: tracking.py says what there was, on the node that has the client.
"""

import logging
from collections.abc import Callable, Mapping

from pamqp import commands

from headrace.core_log.errors import HeadraceError
from headrace.gateways.amqp.channel import Channel
from headrace.gateways.amqp.methods import decode_method, name_of
from headrace.gateways.amqp.operations import Operations
from headrace.gateways.relay.opening import Resumed, ResumedChannel

_log = logging.getLogger(__name__)


def channel_as(was: ResumedChannel) -> Channel:
    """A channel as it was; its consumers come later, when their queues are there."""
    channel = Channel(was.number)
    channel.confirming = was.confirming
    channel.transactional = was.transactional
    channel.channel_prefetch = was.channel_prefetch
    channel.flowing = was.flowing
    channel.last_queue = was.last_queue
    channel.go_on(was.next_tag, was.published)
    return channel


async def resume(
    resumed: Resumed,
    operations: Operations,
    channels: Mapping[int, Channel],
    cancelled: Callable[[Channel, str], None],
) -> None:
    """Declare, bind and consume as before; whoever cannot consume any more is handed to `cancelled`."""
    operations.resuming = True
    try:
        nowhere = Channel(0)
        for payload in resumed.topology:
            method = decode_method(payload)
            try:
                await operations.handle(nowhere, method)
            except HeadraceError as error:
                _log.warning("%s of a resumed connection failed: %s", name_of(method), error)
        for was in resumed.channels:
            channel = channels[was.number]
            for consumer in was.consumers:
                channel.consumer_prefetch = consumer.prefetch
                consume = decode_method(consumer.consume)
                assert isinstance(consume, commands.Basic.Consume)
                try:
                    await operations.handle(channel, consume)
                except HeadraceError as error:
                    _log.info("a consumer is not resumed: %s", error)
                    cancelled(channel, consume.consumer_tag)
            channel.consumer_prefetch = was.consumer_prefetch
    finally:
        operations.resuming = False

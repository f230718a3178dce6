"""`headrace` with one real door, for the tests of signals and ready lines: it sends back what it is sent. Driver.

It stands in for the doors of the protocols, under the name `amqp`. Draining waits until every client has gone.
"""

from functools import partial

import trio

from headrace import cli, node
from headrace.config import Config
from headrace.core_log.directory import LogDirectory
from headrace.core_log.env import Env
from headrace.kinds import Address


class EchoDoor:
    name = "amqp"

    def __init__(self) -> None:
        self._listeners: list[trio.SocketListener] = []
        self._accepting = trio.CancelScope()
        self._done = trio.Event()

    async def open(self, address: Address) -> Address:
        self._listeners = await trio.open_tcp_listeners(address.port, host=address.host)
        host, port = self._listeners[0].socket.getsockname()[:2]
        return Address(host, port)

    async def serve(self) -> None:
        async with trio.open_nursery() as clients:
            with self._accepting:
                await trio.serve_listeners(partial(self._echo), self._listeners, handler_nursery=clients)
        self._done.set()

    async def drain(self) -> None:
        self._accepting.cancel()
        await self._done.wait()

    async def _echo(self, stream: trio.SocketStream) -> None:
        async for data in stream:
            await stream.send_all(data)


async def open_delivery(
    config: Config, env: Env, log: LogDirectory, clean: bool, nursery: trio.Nursery, *, recover_metadata: bool = False
) -> node.Delivery:
    return node.Delivery([EchoDoor()], trio.lowlevel.checkpoint)


if __name__ == "__main__":
    node.open_delivery = open_delivery
    cli.main()

"""Starts peers by name and holds them until interrupted: `python -m bench.peers rabbitmq-classic mosquitto`. Driver.

Once all are up it prints the list that `scenarios.py run --peers` reads. A missing package ends it with status 2.
"""

import argparse
import json
import signal
import sys
from contextlib import ExitStack, suppress

from bench.claim import NotRun
from bench.peers import PEERS
from bench.peers.peer import StartFailed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="Start brokers to measure beside.")
    parser.add_argument("peer", nargs="+", choices=sorted(PEERS))
    chosen: list[str] = parser.parse_args().peer
    # Being asked to end must stop the brokers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with ExitStack() as up:
        try:
            running = [up.enter_context(PEERS[name].start()) for name in chosen]
        except (NotRun, StartFailed) as problem:
            print(problem, file=sys.stderr)
            return 2
        listed = [
            {"name": f"{each.name} {each.version}", "proto": each.proto, "port": each.port, "pid": each.pid}
            | ({"args": list(each.args)} if each.args else {})
            for each in running
        ]
        print(json.dumps(listed, indent=1), flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())

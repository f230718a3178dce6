"""mosquitto_pub, mosquitto_sub and mosquitto_rr of Debian's mosquitto-clients, from a shell. Driver: processes.

What is under them is libmosquitto, in C, that many others are made of.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from interop.broker import Broker
from interop.client import Driven, Feature, debian_version

COMMAND_SECONDS_MAX = 30
VERSIONS = ("mqttv311", "mqttv5")
# What mosquitto_sub ends with when no more came in the time it was given.
TIMED_OUT = 27


def command(broker: Broker, tool: str, *arguments: str) -> list[str]:
    return [f"mosquitto_{tool}", "-h", "127.0.0.1", "-p", str(broker.ports["mqtt"]), *arguments]


def run(broker: Broker, tool: str, *arguments: str, stdin: str = "", status: int = 0) -> str:
    line = command(broker, tool, *arguments)
    done = subprocess.run(line, input=stdin, capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX)
    assert done.returncode == status, (line, done.returncode, done.stdout, done.stderr)
    return done.stdout


@contextmanager
def subscribed(broker: Broker, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A mosquitto_sub that has its SUBACK."""
    line = ["stdbuf", "-oL", *command(broker, "sub", "-d", *arguments)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            while "Subscribed" not in (told := process.stdout.readline()):
                assert told, f"it ended: {line}"
            yield process
        finally:
            process.kill()


def lines(process: "subprocess.Popen[str]") -> list[str]:
    """What it printed of messages until it ended by itself."""
    told, _ = process.communicate(timeout=COMMAND_SECONDS_MAX)
    talk = ("Client ", "Subscribed")
    return [line for line in told.splitlines() if not line.startswith(talk)]


def _qos(broker: Broker, qos: str) -> None:
    """A line of stdin is a message."""
    sent = [str(number) for number in range(50)]
    for version in VERSIONS:
        topic = f"mosquitto/{version}/{qos}"
        with subscribed(broker, "-V", version, "-q", qos, "-t", topic, "-C", "50", "-F", "%p %q %r") as reader:
            run(broker, "pub", "-V", version, "-q", qos, "-t", topic, "-l", stdin="\n".join(sent) + "\n")
            assert lines(reader) == [f"{number} {qos} 0" for number in sent]


def qos_0(broker: Broker) -> None:
    _qos(broker, "0")


def qos_1(broker: Broker) -> None:
    _qos(broker, "1")


def qos_2(broker: Broker) -> None:
    _qos(broker, "2")


def wildcards(broker: Broker) -> None:
    filters = ("-t", "mosquitto/w/+/temp", "-t", "mosquitto/w/all/#")
    with subscribed(broker, *filters, "-q", "1", "-C", "3", "-F", "%t") as reader:
        for rest in ("kitchen/temp", "kitchen/light", "all", "all/a/b"):
            run(broker, "pub", "-q", "1", "-t", f"mosquitto/w/{rest}", "-m", "x")
        assert lines(reader) == ["mosquitto/w/kitchen/temp", "mosquitto/w/all", "mosquitto/w/all/a/b"]


def retained(broker: Broker) -> None:
    for room in ("a", "b"):
        run(broker, "pub", "-q", "1", "-r", "-t", f"mosquitto/kept/{room}", "-m", room)
    told = run(broker, "sub", "-t", "mosquitto/kept/+", "-C", "2", "-W", "20", "-F", "%t %p %r")
    assert sorted(told.splitlines()) == ["mosquitto/kept/a a 1", "mosquitto/kept/b b 1"]
    # Both are taken back by the tool's own option.
    run(broker, "sub", "-t", "mosquitto/kept/+", "--remove-retained", "-W", "1", status=TIMED_OUT)
    assert run(broker, "sub", "-t", "mosquitto/kept/+", "-W", "1", status=TIMED_OUT) == ""


def will(broker: Broker) -> None:
    """A subscriber that is killed."""
    with subscribed(broker, "-t", "mosquitto/will", "-q", "1", "-C", "1") as reader:
        last = ("--will-topic", "mosquitto/will", "--will-payload", "gone", "--will-qos", "1")
        with subscribed(broker, "-t", "mosquitto/other", *last) as mortal:
            mortal.kill()
            assert lines(reader) == ["gone"]


def session(broker: Broker) -> None:
    """Away while messages are published and the broker is killed."""
    for version in VERSIONS:
        lasting = ["-x", "600"] if version == "mqttv5" else []
        asked = ["-V", version, "-c", *lasting, "-i", f"mosquitto-{version}", "-t", f"mosquitto/s/{version}", "-q", "2"]
        run(broker, "sub", *asked, "-E")
        sent = [str(number) for number in range(10)]
        run(broker, "pub", "-q", "2", "-t", f"mosquitto/s/{version}", "-l", stdin="\n".join(sent) + "\n")
        broker.restart()
        assert run(broker, "sub", *asked, "-C", "10", "-W", "20").splitlines() == sent


def shared(broker: Broker) -> None:
    asked = ("-V", "mqttv5", "-t", "$share/workers/mosquitto/jobs", "-q", "1", "-C", "5")
    with subscribed(broker, *asked) as one, subscribed(broker, *asked) as two:
        sent = [str(number) for number in range(10)]
        run(broker, "pub", "-q", "1", "-t", "mosquitto/jobs", "-l", stdin="\n".join(sent) + "\n")
        assert sorted(lines(one) + lines(two)) == sent


def message_properties(broker: Broker) -> None:
    with subscribed(broker, "-V", "mqttv5", "-t", "mosquitto/properties", "-C", "1", "-F", "%C %R %D %P %p") as reader:
        told = [("content-type", "text/plain"), ("response-topic", "here"), ("correlation-data", "c")]
        options = [word for name, value in told for word in ("-D", "publish", name, value)]
        options += ["-D", "publish", "user-property", "a", "1"]
        run(broker, "pub", "-V", "mqttv5", "-t", "mosquitto/properties", "-m", "body", *options)
        assert lines(reader) == ["text/plain here c a:1 body"]


def rpc(broker: Broker) -> None:
    """mosquitto_rr asks; a shell that reads the request and answers it is the other side."""
    with subscribed(broker, "-V", "mqttv5", "-t", "mosquitto/ask", "-C", "1", "-F", "%R %D %p") as responder:
        line = command(broker, "rr", "-V", "mqttv5", "-t", "mosquitto/ask", "-e", "mosquitto/answer", "-m", "21")
        with subprocess.Popen([*line, "-W", "20"], stdout=subprocess.PIPE, text=True) as asking:
            (request,) = lines(responder)
            where, what = request.split()[0], request.split()[-1]
            assert (where, what) == ("mosquitto/answer", "21")
            run(broker, "pub", "-V", "mqttv5", "-q", "1", "-t", where, "-m", "42")
            assert asking.communicate(timeout=COMMAND_SECONDS_MAX)[0].split() == ["42"]


def error(broker: Broker) -> None:
    """A wrong password: refused, with the reason in words and as the status."""
    for version in VERSIONS:
        line = command(broker, "pub", "-V", version, "-u", "guest", "-P", "wrong", "-t", "t", "-m", "x")
        done = subprocess.run(line, capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX)
        assert done.returncode in (4, 5, 134, 135), done
        assert "user name or password" in done.stderr.lower() or "not authori" in done.stderr.lower(), done.stderr


CLIENT = Driven(
    "mosquitto_pub, _sub, _rr",
    debian_version("mosquitto-clients", "mosquitto_pub", "mosquitto_sub", "mosquitto_rr"),
    {
        Feature.QOS_0: qos_0,
        Feature.QOS_1: qos_1,
        Feature.QOS_2: qos_2,
        Feature.WILDCARDS: wildcards,
        Feature.RETAINED: retained,
        Feature.WILL: will,
        Feature.SESSION: session,
        Feature.SHARED: shared,
        Feature.PROPERTIES: message_properties,
        Feature.RPC: rpc,
        Feature.ERROR: error,
    },
    nullcontext,
)

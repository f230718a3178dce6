"""Our own sections: what they default to, and that the page which lists them tells the truth."""

import re
from pathlib import Path

import pytest

from headrace.config import Config, load_config
from headrace.controller.config import UserDefinition
from headrace.controller.entities import UserLimits
from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.gateways.amqp.config import AmqpConfig
from headrace.gateways.delivery.alarms import AlarmsConfig
from headrace.gateways.delivery.limits import LimitsConfig
from headrace.gateways.delivery.tls import NameFrom, TlsConfig
from headrace.kinds import Address
from headrace.settings import ConfigError, settings_of

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
DOORS = {"amqp": 5672, "amqps": 5671, "mqtt": 1883, "mqtts": 8883, "ws": 8083, "wss": 8084}
DOORS |= {"http": 15672, "https": 15671, "peer": 25672}
OPEN_BY_DEFAULT = ("amqp", "mqtt", "ws", "http")


def test_defaults_need_no_file_and_listen_on_loopback_only() -> None:
    config = load_config(None, {}, {})
    assert config == Config()
    for name, port in DOORS.items():
        expected = Address("127.0.0.1", port) if name in OPEN_BY_DEFAULT else None
        assert getattr(config.doors, name) == expected


@pytest.mark.parametrize("name", DOORS)
def test_every_door_has_a_flag_and_can_be_shut(name: str) -> None:
    assert {one.flag for one in settings_of(Config) if one.name == f"doors.{name}"} == {f"--{name}"}
    assert getattr(load_config(None, {}, {f"doors.{name}": "off"}).doors, name) is None


def test_all_of_a_file_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text(
        """
        [node]
        data = "/srv/headrace"
        drain_seconds = "1m"
        [doors]
        amqp = "[::]:5672"
        mqtt = "off"
        [log]
        level = "debug"
        format = "json"
        [storage]
        segment_bytes = "128MiB"
        handles_max = 64
        durability = "interval"
        interval_ms = "50ms"
        compression = "lz4"
        retention_ms = "unlimited"
        retention_bytes = "10GiB"
        tail_cache_bytes = "1GiB"
        journal_bytes = "8MiB"
        """
    )
    config = load_config(path, {"HEADRACE_STORAGE__HANDLES_MAX": "128"}, {"log.level": "error"})
    assert (config.node.data, config.node.drain_seconds) == (Path("/srv/headrace"), 60)
    assert (config.doors.amqp, config.doors.mqtt) == (Address("::", 5672), None)
    assert (config.log.level, config.log.format) == ("error", "json")
    assert config.storage.handles_max == 128
    assert config.storage.stream_defaults() == LogConfig(
        durability="interval",
        compression="lz4",
        retention_ms=None,
        retention_bytes=10 << 30,
        segment_bytes_max=128 << 20,
    )
    assert config.storage.directory() == DirectoryConfig(
        tail_cache_bytes_max=1 << 30, journal_bytes_max=8 << 20, interval_ms=50
    )


def test_our_defaults_are_those_of_the_log() -> None:
    storage = Config().storage
    assert (storage.stream_defaults(), storage.directory()) == (LogConfig(), DirectoryConfig())


def test_defaults_of_the_doors_are_those_of_their_rooms() -> None:
    config = Config()
    assert config.amqp.door() == AmqpConfig()
    assert (config.limits.values(), config.alarms.values()) == (LimitsConfig(), AlarmsConfig())
    assert config.tls.doors() is None


def test_settings_of_the_doors_reach_their_rooms(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text(
        """
        [amqp]
        allow_plaintext_auth = true
        heartbeat_s = 10
        consumer_timeout_ms = "0s"
        [tls]
        certificate = "server.pem"
        key = "server.key"
        client_ca = "ca.pem"
        name_from = "cn"
        [limits]
        connections_max = "unlimited"
        channels_per_user_max = 7
        [alarms]
        memory_share = "50%"
        disk_free_bytes = "10GiB"
        """
    )
    config = load_config(path, {}, {})
    assert config.amqp.door() == AmqpConfig(allow_plaintext_auth=True, heartbeat_s=10, consumer_timeout_ms=0)
    assert config.tls.doors() == TlsConfig(
        Path("server.pem"), Path("server.key"), Path("ca.pem"), name_from=NameFrom.CN
    )
    assert config.limits.values() == LimitsConfig(connections_max=None, channels_per_user_max=7)
    assert config.alarms.values() == AlarmsConfig(memory_share=0.5, disk_free_bytes=10 << 30)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('certificate = "a.pem"', "tls.key: missing"),
        ('key = "a.key"', "tls.certificate: missing"),
        ('client_ca = "ca.pem"', "tls: client certificates need certificate and key"),
        ("client_certificate_required = true", "tls: client certificates need certificate and key"),
        (
            'certificate = "a.pem"\nkey = "a.key"\nclient_certificate_required = true',
            "tls.client_certificate_required: client certificates cannot be required without a client_ca",
        ),
    ],
)
def test_half_a_configuration_of_tls_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text(f"[tls]\n{text}\n")
    with pytest.raises(ConfigError, match=problem):
        load_config(path, {}, {})


def test_definitions_stand_beside_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text(
        """
        [limits]
        connections_max = 5
        [limits.users.ann]
        max_channels = 3
        [[users]]
        name = "ann"
        password = "canary"
        [[vhosts]]
        name = "shop"
        """
    )
    config = load_config(path, {}, {})
    assert config.limits.connections_max == 5
    assert config.definitions.users == (UserDefinition("ann", password="canary"),)
    assert config.definitions.user_limits == (UserLimits("ann", channels_max=3),)
    assert config.file == path
    assert "canary" not in repr(config)


def test_problem_of_a_definition_names_file_and_field(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text('[[users]]\nname = "ann"\npasword = "canary"\n[limits]\nconnection_max = 5\n')
    with pytest.raises(ConfigError) as caught:
        load_config(path, {}, {})
    assert caught.value.problems == (f"{path}: limits.connection_max: unknown field",)
    path.write_text('[[users]]\nname = "ann"\npasword = "canary"\n')
    with pytest.raises(ConfigError) as caught:
        load_config(path, {}, {})
    assert caught.value.problems == (f"{path}: users[0].pasword: unknown field",)


def test_mistyped_key_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean HEADRACE_STORAGE__SEGMENT_BYTES"):
        load_config(None, {"HEADRACE_STORAGE__SEGMNT_BYTES": "1MiB"}, {})


def test_page_lists_every_key_with_its_default_flag_and_meaning() -> None:
    row = re.compile(r"^\| `(\w+)` \| `([^`]*)` \| (.*?) \| (?:`(--[\w-]+)`)? \| (yes)? \|$", re.MULTILINE)
    listed = []
    for part in PAGE.read_text().split("\n## ")[1:]:
        heading = re.match(r"`\[(\w+)\]`", part)
        if heading is not None:
            listed += [(heading[1], *cells) for cells in row.findall(part)]
    declared = [
        (one.section, one.key, one.kind.show(one.default), one.doc, one.flag or "", "yes" if one.live else "")
        for one in settings_of(Config)
    ]
    assert listed == declared


def test_logins_of_readers_in_the_environment_are_no_settings_of_a_node() -> None:
    load_config(None, {"HEADRACE_TOKENS": "/somewhere", "HEADRACE_TOKEN_REPORTS": "ann:secret"}, {})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"cluster.node_id": "2"}, "cluster.store: missing"),
        ({"cluster.store": "postgresql://db/headrace", "cluster.secret_file": "s"}, "cluster.node_id: missing"),
        ({"cluster.store": "postgresql://db/headrace", "cluster.node_id": "1"}, "cluster.secret_file: missing"),
    ],
)
def test_half_a_cluster_is_refused(given: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {}, given)
    assert [one for one in caught.value.problems if one.startswith(problem)]

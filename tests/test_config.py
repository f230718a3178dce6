"""Our own sections: what they default to, and that the page which lists them tells the truth."""

import re
from pathlib import Path

import pytest

from headrace.config import Config, load_config
from headrace.core_log.config import DirectoryConfig, LogConfig
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

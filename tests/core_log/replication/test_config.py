"""Settings that cannot work are refused when they are made."""

import pytest

from headrace.core_log.replication.config import ReplicationConfig


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"lag_s": 0}, "lag_s must be more than 0"),
        ({"silence_s": 0.2}, "silence_s must be longer"),
        ({"fetch_bytes_max": 0}, "fetch_bytes_max"),
        ({"throttle_bytes_s": 0}, "throttle_bytes_s"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(setting: dict[str, float], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ReplicationConfig(**setting)  # type: ignore[arg-type]

"""What a queue's arguments and its policy ask for together, in the words of the delivery room. Format; pure.

An argument wins over a policy, except where RabbitMQ takes the lower of both: TTLs, lengths and expiry.
"""

from headrace.controller.table import Table
from headrace.gateways.amqp.arguments import (
    DeadLetterStrategy,
    QueueArguments,
    QueueType,
    RetryArguments,
    age_ms,
    parse_queue_arguments,
)
from headrace.gateways.delivery.filters import Unmatched
from headrace.gateways.delivery.logsettings import log_settings
from headrace.gateways.delivery.queue import Overflow, QueueSettings
from headrace.gateways.delivery.retry import DELAY_MAX_MS, DELAY_MS, Backoff, RetryPolicy

QUORUM_DELIVERY_LIMIT = 20


def settings_of(arguments: Table, policy: Table) -> QueueSettings:
    """For arguments that were checked when the queue was declared, and a policy that was checked when it was set."""
    asked = parse_queue_arguments(arguments, "", "", durable=True, exclusive=False, auto_delete=False)
    return combine(asked, policy)


def combine(asked: QueueArguments, policy: Table) -> QueueSettings:
    overflow = asked.overflow or _overflow(policy.get("overflow"))
    is_stream = asked.queue_type is QueueType.STREAM
    log = log_settings(asked.table, policy, is_stream=is_stream)
    length_bytes_max = _lower(asked.max_length_bytes, policy.get("max-length-bytes"))
    max_age_ms = None
    if is_stream:
        # It is kept by its history: both names mean one thing there.
        length_bytes_max = _lower(length_bytes_max, log.retention_bytes)
        max_age_ms = _lower(_lower(asked.max_age_ms, _age_ms(policy.get("max-age"))), log.retention_ms)
    return QueueSettings(
        message_ttl_ms=_lower(asked.message_ttl_ms, policy.get("message-ttl")),
        expires_ms=_lower(asked.expires_ms, policy.get("expires")),
        length_max=_lower(asked.max_length, policy.get("max-length")),
        length_bytes_max=length_bytes_max,
        overflow=overflow,
        priority_max=asked.max_priority,
        partition_count=asked.stream.partitions,
        dead_letter_exchange=_text(asked.dead_letter_exchange, policy.get("dead-letter-exchange")),
        dead_letter_routing_key=_text(asked.dead_letter_routing_key, policy.get("dead-letter-routing-key")),
        at_least_once=_at_least_once(asked, policy, overflow),
        retry=None if is_stream else _retry(asked.retry, policy),
        delivery_limit=_delivery_limit(asked, policy),
        consumer_timeout_ms=_lower(asked.consumer_timeout_ms, policy.get("consumer-timeout")),
        single_active_consumer=asked.single_active_consumer,
        committed_dispatch=asked.dispatch == "committed",
        tells_failures=asked.queue_type is QueueType.QUORUM,
        stream=is_stream,
        filter_unmatched=asked.filter_unmatched or _unmatched(policy.get("filter-unmatched")),
        max_age_ms=max_age_ms,
        log=log,
    )


def _at_least_once(asked: QueueArguments, policy: Table, overflow: Overflow) -> bool:
    """As in RabbitMQ: of quorum queues, and only where a full one refuses, so that what stays has an end."""
    strategy = asked.dead_letter_strategy or policy.get("dead-letter-strategy")
    is_quorum = asked.queue_type is QueueType.QUORUM
    return is_quorum and strategy == DeadLetterStrategy.AT_LEAST_ONCE and overflow is Overflow.REJECT_PUBLISH


def _retry(asked: RetryArguments, policy: Table) -> RetryPolicy | None:
    """A retry policy, if anybody says how often; for the rest an argument wins, and then the defaults hold."""
    retries_max = _first(asked.max, policy.get("retry-max"))
    if retries_max is None:
        return None
    backoff = asked.backoff or policy.get("retry-backoff")
    delay_ms = _first(asked.delay_ms, policy.get("retry-delay-ms"))
    delay_ms = DELAY_MS if delay_ms is None else delay_ms
    delay_max_ms = _first(asked.delay_max_ms, policy.get("retry-delay-max-ms"))
    return RetryPolicy(
        retries_max,
        Backoff(backoff) if isinstance(backoff, str) else Backoff.EXPONENTIAL,
        delay_ms,
        max(DELAY_MAX_MS, delay_ms) if delay_max_ms is None else delay_max_ms,
        (asked.jitter if asked.jitter is not None else policy.get("retry-jitter")) is True,
    )


def _first(argument: int | None, policy: object) -> int | None:
    return argument if argument is not None else policy if isinstance(policy, int) else None


def _delivery_limit(asked: QueueArguments, policy: Table) -> int | None:
    limit = _lower(asked.delivery_limit, policy.get("delivery-limit"))
    if limit is None and asked.queue_type is QueueType.QUORUM:
        return QUORUM_DELIVERY_LIMIT
    return None if limit == -1 else limit


def _lower(argument: int | None, policy: object) -> int | None:
    found = [value for value in (argument, policy) if isinstance(value, int)]
    return min(found, default=None)


def _age_ms(policy: object) -> int | None:
    return age_ms(policy) if isinstance(policy, str) else None


def _text(argument: str | None, policy: object) -> str | None:
    return argument if argument is not None else policy if isinstance(policy, str) else None


def _unmatched(policy: object) -> Unmatched:
    return Unmatched(policy) if isinstance(policy, str) else Unmatched.STAY


def _overflow(policy: object) -> Overflow:
    return Overflow(policy) if isinstance(policy, str) else Overflow.DROP_HEAD

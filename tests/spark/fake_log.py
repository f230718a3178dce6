"""A log of which only names and ends are known, for what is decided before anything is read. Value of tests."""

from dataclasses import dataclass, field, replace
from uuid import UUID, uuid4

from headrace.spark.access import DataLoss, PartitionEnds, Slice, TopicInfo, TopicNotFound


@dataclass
class FakeLog:
    """An Access. Records are a second and 100 bytes each, from the first second of 1970 on."""

    infos: dict[str, TopicInfo] = field(default_factory=dict)

    def add(self, name: str, *ends: tuple[int, int], id: UUID | None = None) -> TopicInfo:
        """`ends`: the first offset and the watermark of each partition."""
        partitions = tuple(PartitionEnds(number, *one) for number, one in enumerate(ends))
        self.infos[name] = TopicInfo(name, id or uuid4(), False, partitions)
        return self.infos[name]

    def grow(self, name: str, *ends: tuple[int, int]) -> None:
        self.add(name, *ends, id=self.infos[name].id)

    def compact(self, name: str) -> None:
        self.infos[name] = replace(self.infos[name], is_compacted=True)

    def topics(self) -> list[str]:
        return sorted(self.infos)

    def topic(self, name: str) -> TopicInfo:
        for full in (name, f"exchange:{name}", f"queue:{name}"):
            if full in self.infos:
                return self.infos[full]
        raise TopicNotFound(f"no topic '{name}'")

    def offset_at(self, topic: str, partition: int, timestamp_us: int) -> int | None:
        ends = self.topic(topic).partitions[partition]
        found = max(-(-timestamp_us // 1_000_000), ends.start)
        return found if found < ends.high_watermark else None

    def slices(self, topic: str, partition: int, start: int, end: int) -> list[Slice]:
        ends = self.topic(topic).partitions[partition]
        if start < ends.start:
            raise DataLoss(f"offset {start} is gone")
        if end > ends.high_watermark:
            raise ValueError(f"{end} lies above the watermark")
        cuts = tuple((offset, 100 * (offset - start)) for offset in range(start + 10, end, 10))
        return [Slice((), start, 1, 0, 100 * (end - start), start, end, cuts=cuts)]

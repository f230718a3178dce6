"""The streams that consumer groups read, and their names. Driver: looks into the broker's topology.

A group keeps to streams, so that a topic that was deleted and made again is another one to it. Here a stream's name is
found, its partitions, and that it is gone. Neighbours: topics.py leads from names to streams.
"""

from collections.abc import Sequence

from headrace.core_log.ids import StreamId
from headrace.core_log.log import PartitionLog
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.topics import Place, TopicKind, Topics

_KINDS = {kind.value: kind for kind in TopicKind}


class GroupTopics:
    def __init__(self, broker: Broker, topics: Topics) -> None:
        self._broker = broker
        self._topics = topics
        # What was found before; it is looked at again whether that still holds.
        self._known: dict[StreamId, Place] = {}

    def maybe_place(self, stream: StreamId) -> Place | None:
        """What a stream is called now; None: it is gone."""
        place = self._known.get(stream) or self._find(stream)
        if place is None or not self._topics.is_there(place):
            self._known.pop(stream, None)
            return None
        self._known[stream] = place
        return place

    def _find(self, stream: StreamId) -> Place | None:
        found = self._broker.directory.streams.get(stream)
        if found is not None:
            kind = _KINDS.get(found.spec.kind)
            return None if kind is None else Place(found.spec.vhost, kind, found.spec.name, stream)
        # Nothing was ever written to it.
        snapshot = self._broker.metadata.snapshot
        for kind, entities in ((TopicKind.EXCHANGE, snapshot.exchanges), (TopicKind.QUEUE, snapshot.queues)):
            for one in entities.values():
                if one.stream == stream:
                    return Place(one.vhost, kind, one.name, stream)
        return None

    def note(self, place: Place) -> None:
        """A name that was resolved, so that it need not be looked for."""
        self._known[place.stream_id] = place

    def logs_of(self, stream: StreamId) -> Sequence[PartitionLog | None]:
        """For the coordinator: a stream that nothing was written to has one partition, and no log yet."""
        if self.maybe_place(stream) is None:
            return ()
        return self._topics.logs_of(stream) or (None,)

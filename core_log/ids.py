"""Names of places in the log. Values."""

from typing import NewType
from uuid import UUID

Offset = NewType("Offset", int)
Epoch = NewType("Epoch", int)
NodeId = NewType("NodeId", int)
PartitionIndex = NewType("PartitionIndex", int)
StreamId = NewType("StreamId", UUID)
# A durable view's id, as it stands in the route sets of batches. Never reused.
ViewId = NewType("ViewId", int)

"""Every state in which a loss of power may leave a directory, at every moment of a traced run. Machine.

A TracingStorage writes down what is done to a storage, and the marks a test drops between ("acked", 7). crash_states
then plays each prefix of that trace again and yields the states its unsynced changes allow, up to a limit and the
likely culprits first: all kept, all lost, the last write torn, then one change lost, one kept, one torn, the newest
lost together, and pairs. The same trace gives the same states. A test opens each with the real recovery and asks for
everything that was marked.

Neighbours: tree.py says what may survive; memory.py draws one state at random where this walks through them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, zip_longest

from headrace.core_log.storage.contract import Buffer, File, Storage
from headrace.core_log.storage.memory import SECTOR_BYTES, MemoryStorage
from headrace.core_log.storage.tree import Change, ContentChange, Fate


@dataclass(frozen=True, slots=True)
class Operation:
    """A call that changed something: on the storage, or on the file that was the `file`-th to be opened."""

    file: int | None
    method: str
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """What the test knew at this moment, such as an offset that had been acknowledged."""

    name: str
    value: object


@dataclass(frozen=True, slots=True)
class CrashState:
    """What is left after a loss of power behind the first `prefix` steps; `lost` names what did not survive whole."""

    prefix: int
    marks: tuple[Mark, ...]
    lost: tuple[str, ...]
    storage: MemoryStorage

    def marked(self, name: str) -> list[object]:
        """The values of the marks of that name before the crash, oldest first."""
        return [mark.value for mark in self.marks if mark.name == name]


class TracedFile:
    __slots__ = ("_file", "_number", "_trace")

    def __init__(self, file: File, number: int, trace: list[Operation | Mark]) -> None:
        self._file = file
        self._number = number
        self._trace = trace

    @property
    def path(self) -> str:
        return self._file.path

    def write(self, position: int, buffers: Sequence[Buffer]) -> int:
        written = self._file.write(position, buffers)
        self._trace.append(Operation(self._number, "write", (position, [b"".join(buffers)])))
        return written

    def read(self, position: int, length: int) -> bytes:
        return self._file.read(position, length)

    def size(self) -> int:
        return self._file.size()

    def sync(self) -> None:
        self._file.sync()
        self._trace.append(Operation(self._number, "sync", ()))

    def truncate(self, size: int) -> None:
        self._file.truncate(size)
        self._trace.append(Operation(self._number, "truncate", (size,)))

    def fileno(self) -> int:
        return self._file.fileno()


class TracingStorage(Storage):
    """Does everything on `inner` and writes it down. `inner` is empty, or a MemoryStorage with all of it durable."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self._opened = 0
        self.trace: list[Operation | Mark] = []
        # What was there before the first step: crashes of a recovery are traced from such a state.
        self.start = inner.after_power_loss(lambda _: True) if isinstance(inner, MemoryStorage) else MemoryStorage()

    def mark(self, name: str, value: object) -> None:
        self.trace.append(Mark(name, value))

    def open(self, path: str, *, create: bool = False) -> File:
        file = self._inner.open(path, create=create)
        self.trace.append(Operation(self._opened, "open", (path, create)))
        self._opened += 1
        return TracedFile(file, self._opened - 1, self.trace)

    def exists(self, path: str) -> bool:
        return self._inner.exists(path)

    def list(self, path: str) -> list[str]:
        return self._inner.list(path)

    def make_dir(self, path: str) -> None:
        self._inner.make_dir(path)
        self.trace.append(Operation(None, "make_dir", (path,)))

    def rename(self, old: str, new: str) -> None:
        self._inner.rename(old, new)
        self.trace.append(Operation(None, "rename", (old, new)))

    def remove(self, path: str) -> None:
        self._inner.remove(path)
        self.trace.append(Operation(None, "remove", (path,)))

    def remove_dir(self, path: str) -> None:
        self._inner.remove_dir(path)
        self.trace.append(Operation(None, "remove_dir", (path,)))

    def sync_dir(self, path: str) -> None:
        self._inner.sync_dir(path)
        self.trace.append(Operation(None, "sync_dir", (path,)))

    def read_file(self, path: str) -> bytes:
        return self._inner.read_file(path)

    def free_bytes(self) -> int:
        return self._inner.free_bytes()

    def lock(self) -> None:
        self._inner.lock()
        self.trace.append(Operation(None, "lock", ()))

    def unlock(self) -> None:
        self._inner.unlock()
        self.trace.append(Operation(None, "unlock", ()))

    @property
    def poisoned(self) -> bool:
        return self._inner.poisoned


def crash_states(traced: TracingStorage, *, limit_per_prefix: int = 64) -> Iterator[CrashState]:
    """For every prefix of the trace, the empty one too, up to that many of the states a loss of power may leave."""
    live = traced.start.after_power_loss(lambda _: True)
    files: dict[int, File] = {}
    marks: list[Mark] = []
    for prefix in range(len(traced.trace) + 1):
        if prefix:
            _repeat(traced.trace[prefix - 1], live, files, marks)
        changes = live.unsynced()
        for fates in islice(_distinct(_fates(changes)), limit_per_prefix):
            fate_of = dict(zip(changes, fates, strict=True))
            lost = tuple(_describe(change, fate) for change, fate in fate_of.items() if fate is not True)
            yield CrashState(prefix, tuple(marks), lost, live.after_power_loss(fate_of.__getitem__))


def _repeat(step: Operation | Mark, live: MemoryStorage, files: dict[int, File], marks: list[Mark]) -> None:
    match step:
        case Mark():
            marks.append(step)
        case Operation(file=int(number), method="open", arguments=(str(path), bool(create))):
            files[number] = live.open(path, create=create)
        case Operation(file=number, method=method, arguments=arguments):
            getattr(live if number is None else files[number], method)(*arguments)


def _describe(change: Change, fate: Fate) -> str:
    return f"{change} lost" if fate is False else f"{change} torn to {fate}"


def _fates(changes: Sequence[Change]) -> Iterator[tuple[Fate, ...]]:
    names = tuple(not isinstance(change, ContentChange) for change in changes)
    contents = tuple(not name for name in names)
    everything, nothing = (True,) * len(changes), (False,) * len(changes)
    newest = range(len(changes) - 1, -1, -1)
    tears = [(index, tear) for index in newest for tear in _tears(changes[index])]
    yield from (everything, nothing, names, contents)
    yield from (_but(everything, index, tear) for index, tear in tears if index == tears[0][0])
    # One of each family in turn: under the limit none starves the others.
    families = (
        (_but(everything, index, False) for index in newest),
        # The only one of its kind: a content needs its name, and a name is worth looking at with its content.
        (_but(contents if names[index] else names, index, True) for index in newest),
        (_but(everything, index, tear) for index, tear in tears),
        (everything[:index] + nothing[index:] for index in newest),
        (_but(_but(everything, one, False), other, False) for one, other in combinations(newest, 2)),
        (_but(_but(nothing, one, True), other, True) for one, other in combinations(newest, 2)),
    )
    for turn in zip_longest(*families):
        yield from (fates for fates in turn if fates is not None)


def _but(fates: tuple[Fate, ...], index: int, fate: Fate) -> tuple[Fate, ...]:
    return (*fates[:index], fate, *fates[index + 1 :])


def _tears(change: Change) -> list[Fate]:
    """The ways in which a write is torn: near its ends, in its middle, at its sectors, or to the size alone."""
    if not isinstance(change, ContentChange) or change.data is None:
        return []
    length = len(change.data)
    borders = range(SECTOR_BYTES - change.position % SECTOR_BYTES, length, SECTOR_BYTES)
    cuts = {length // 2, 1, length - 1, *borders[:1], *borders[-1:]} - {0, length}
    heads: list[Fate] = [((0, cut),) for cut in sorted(cuts)]
    tails: list[Fate] = [((cut, length),) for cut in (borders[:1] or [length // 2]) if cut]
    return [*heads, *tails, ((length, length),)]


def _distinct(drawn: Iterable[tuple[Fate, ...]]) -> Iterator[tuple[Fate, ...]]:
    seen: set[tuple[Fate, ...]] = set()
    for fates in drawn:
        if fates not in seen:
            seen.add(fates)
            yield fates

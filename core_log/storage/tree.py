"""Files and names of which part is durable, and what a loss of power may leave of them. Machine.

The contract read strictly. Every unsynced write or cut of a file is kept, lost or torn, each for itself, because
pages reach a disk in any order; what was there before shows through. Every unsynced change of a name is kept or
lost, each for itself, but whole: a rename leaves the old names or the new. A change of a name builds on the earlier
ones of that name, so it is lost with them. Synced bytes under a lost name are lost, and a durable name may stand
over lost bytes.

Invariants: `names` and `content` are what a process sees; `durable` with all pending changes applied is equal to
it. Neighbours: memory.py makes a storage of it, crash.py walks through its fates.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class ContentChange:
    """A write, or a cut to `position` (data is None), that no sync has covered."""

    number: int
    path: str
    position: int
    data: bytes | None
    # A sync failed over it: its pages count as clean, so that no later sync writes them.
    doomed: bool = False
    # A later sync covered it, but a doomed change before it keeps it from being folded into the durable bytes.
    synced: bool = False

    def __str__(self) -> str:
        if self.data is None:
            return f"truncate {self.path} to {self.position}"
        return f"write {self.path} {self.position}+{len(self.data)}"


@dataclass(slots=True, eq=False)
class NameChange:
    """A creation, rename or removal that no sync of `folder` has covered."""

    number: int
    text: str
    folder: "Folder"
    effects: tuple["Effect", ...]
    # The names it is about: an earlier change of one of them is on the disk before this one.
    places: frozenset[tuple["Folder", str]]

    def __str__(self) -> str:
        return self.text


Change = ContentChange | NameChange
# Kept, lost, or (of a write) only these ranges of its bytes; an empty range still brings the file up to that size.
Fate = bool | tuple[tuple[int, int], ...]
Fates = Callable[[Change], Fate]


def _put(content: bytearray, position: int, data: bytes) -> None:
    if position > len(content):
        content.extend(bytes(position - len(content)))
    content[position : position + len(data)] = data


def _apply(content: bytearray, change: ContentChange, fate: Fate = True) -> None:
    data, position = change.data, change.position
    if fate is False:
        return
    if data is None:
        del content[position:]
        content.extend(bytes(position - len(content)))
    elif fate is True:
        _put(content, position, data)
    else:
        for start, end in fate:
            _put(content, position + start, data[start:end])


class Inode:
    """A file without its name; `changes` lie between `durable` and `content`, oldest first."""

    __slots__ = ("changes", "content", "durable", "path")

    def __init__(self, path: str, durable: bytearray) -> None:
        self.path = path
        self.durable = durable
        self.content = bytearray(durable)
        self.changes: list[ContentChange] = []

    def change(self, number: int, position: int, data: bytes | None) -> None:
        change = ContentChange(number, self.path, position, data)
        self.changes.append(change)
        _apply(self.content, change)

    def sync(self) -> None:
        covered = self.changes[:]
        if any(change.doomed for change in covered):
            for change in covered:
                change.synced = not change.doomed
        else:
            for change in covered:
                _apply(self.durable, change)
            del self.changes[: len(covered)]

    def fail_sync(self) -> None:
        for change in self.changes:
            change.doomed = not change.synced

    def survivor(self, path: str, fates: Fates) -> "Inode":
        content = bytearray(self.durable)
        for change in self.changes:
            _apply(content, change, True if change.synced else fates(change))
        return Inode(path, content)


class Folder:
    __slots__ = ("durable", "names")

    def __init__(self) -> None:
        self.names: dict[str, Node] = {}
        self.durable: dict[str, Node] = {}


Node = Inode | Folder
Effect = tuple[Folder, str, Node | None]  # in that folder, that name is then of this, or of nothing


def _assign(names: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def files(node: Node, path: str) -> Iterator[tuple[Inode, str]]:
    """Every file at or under `node` with its path, when the node's own is `path`."""
    if isinstance(node, Inode):
        yield node, path
    else:
        for name, inner in node.names.items():
            yield from files(inner, f"{path}/{name}" if path else name)


class Tree:
    """All names from the root down, and the changes of names that are not durable, oldest first."""

    __slots__ = ("_name_changes", "_number", "root")

    def __init__(self, root: Folder) -> None:
        self.root = root
        self._name_changes: list[NameChange] = []
        self._number = 0

    def maybe_find(self, path: str) -> Node | None:
        node: Node | None = self.root
        for name in path.split("/") if path else ():
            node = node.names.get(name) if isinstance(node, Folder) else None
        return node

    def next_number(self) -> int:
        """Changes are counted through, so that they can be put in order."""
        self._number += 1
        return self._number

    def change_names(self, text: str, folder: Folder, *effects: Effect) -> None:
        """One atomic change of names, durable when `folder` is synced."""
        places = frozenset((place, name) for place, name, _ in effects)
        self._name_changes.append(NameChange(self.next_number(), text, folder, effects, places))
        for place, name, node in effects:
            _assign(place.names, name, node)

    def sync_folder(self, folder: Folder) -> None:
        """Make durable its changes of names, and what they build on."""
        covered: list[NameChange] = []
        rest: list[NameChange] = []
        places: set[tuple[Folder, str]] = set()
        for change in reversed(self._name_changes):
            if change.folder is folder or not places.isdisjoint(change.places):
                places |= change.places
                covered.append(change)
            else:
                rest.append(change)
        for change in reversed(covered):
            for place, name, node in change.effects:
                _assign(place.durable, name, node)
        self._name_changes = rest[::-1]

    def survivor(self, fates: Fates) -> "Tree":
        """What a loss of power leaves when each unsynced change meets its fate. This tree stays as it is."""
        lost: set[tuple[Folder, str]] = set()
        durable: dict[Folder, dict[str, Node]] = {}
        for change in self._name_changes:
            if lost.isdisjoint(change.places) and fates(change):
                for folder, name, node in change.effects:
                    _assign(durable.setdefault(folder, dict(folder.durable)), name, node)
            else:
                lost |= change.places

        def revive(folder: Folder, path: str) -> Folder:
            revived = Folder()
            for name, node in sorted(durable.get(folder, folder.durable).items()):
                place = f"{path}/{name}" if path else name
                revived.durable[name] = node.survivor(place, fates) if isinstance(node, Inode) else revive(node, place)
            revived.names = dict(revived.durable)
            return revived

        return Tree(revive(self.root, ""))

    def changes(self) -> list[Change]:
        """Every change that a loss of power may take, oldest first."""
        reached: dict[Node, None] = {self.root: None}
        waiting: list[Node] = [self.root]
        waiting += [node for change in self._name_changes for _, _, node in change.effects if node is not None]
        while waiting:
            node = waiting.pop()
            reached[node] = None
            if isinstance(node, Folder):
                inner = (*node.names.values(), *node.durable.values())
                waiting.extend(each for each in inner if each not in reached)
        content = [change for node in reached if isinstance(node, Inode) for change in node.changes]
        found: list[Change] = [*self._name_changes, *(change for change in content if not change.synced)]
        return sorted(found, key=lambda change: change.number)

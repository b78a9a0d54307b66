"""The common model of every view: items in a tree of modules, in which repeated layers appear once."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.export import ExportedProgram

from tpcompiler._torch import GRADIENT_KINDS
from tpcompiler.artifact.collective_records import counted_kinds
from tpcompiler.artifact.program import ArtifactProgram
from tpcompiler.checkpoint.leaves import held_per_rank
from tpcompiler.ir import edit
from tpcompiler.report.items import Item, Module, color_of, items_of, joined, numbered, seen_from
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import Collective, mesh_text
from tpcompiler.runtime.weights import dtype_of

FEWEST = 4  # ops that deserve a frame

Stands = dict[str, str]  # a hidden item -> the item that is drawn for it


@dataclass(frozen=True)
class Group:
    """A module and its members.

    Attributes:
        path: the FQN; for repeated layers, that of the first.
        count: the number of equal layers that it represents.
        calls: the number of equal consecutive calls, which is then the `count` too.
        step: from one of these layers to the next: -1 where a backward runs through them.
        title: the FQN, `encoder.layer.* x 6`, or `block, called 4 times`.
    """

    path: str
    members: tuple[Item | Group, ...]
    count: int = 1
    calls: int = 1
    step: int = 1
    title: str = ""

    def items(self) -> Iterator[Item]:
        for member in self.members:
            if isinstance(member, Item):
                yield member
            else:
                yield from member.items()

    def records(self) -> list[Collective]:
        """Return the collectives of one of the `count` layers, with repeated ones inside it repeated."""
        out = []
        for member in self.members:
            if isinstance(member, Group):
                out += member.records() * member.count
            elif member.record is not None:
                out.append(member.record)
        return out


@dataclass(frozen=True)
class Outline:
    """The content of a view.

    Attributes:
        root: inputs, the tree of modules, outputs; sources name items in it.
        program: the rank's program.
        items: all items, those of every layer included.
        drawn: the name of an item -> the item in `root` that represents it.
    """

    manifest: Manifest
    rank: int
    root: Group
    program: ExportedProgram
    items: tuple[Item, ...]
    drawn: Mapping[str, str]

    @property
    def mesh(self) -> str:
        return mesh_text(self.manifest.mesh).replace(",", ", ")

    @property
    def bytes_here(self) -> int:
        """The bytes of this rank's parameters, buffers and constants; tied tensors count once."""
        return held_per_rank(self.manifest)[self.rank]

    @property
    def bytes_whole(self) -> int:
        """The bytes of the same on one device."""
        rows = (row for row in self.manifest.tensors if row.tied_to is None)
        return sum(math.prod(row.shape) * dtype_of(row.dtype).itemsize for row in rows)


def outline_of(program: ArtifactProgram, rank: int = 0, *, first: ArtifactProgram | None = None) -> Outline:
    """Return the outline of one rank's program, whose weights may still be uncut.

    With `first`, another artifact of the same model, items have their counterparts in its rank 0.

    Raises:
        ArtifactError: a file is damaged or needs a module imported, or the rank is outside the world.
    """
    manifest, exported = program.manifest, program.shown(rank)
    items = items_of(exported, manifest)
    if first is not None:
        items = with_before(items, items_of(first.shown(0), first.manifest))
    items = joined(put_backward_last(items, exported))
    stands: Stands = {}
    root = _folded(_tree(items), stands)
    root = _merged_ends(root, items, stands)
    root = _flattened(_redirected(root, stands))
    drawn = {item.name: _stand(item.name, stands) for item in items}
    return Outline(manifest, rank, root, exported, tuple(items), drawn)


def legend_of(root: Group) -> dict[str, list[str]]:
    """Return the colours of a view, each with its shardings, sorted."""
    legend: dict[str, set[str]] = {}
    for item in root.items():
        for sharding in (item.sharding, *(leaf.sharding for leaf in (*item.leaves, *item.writes))):
            if not _is_sent(item) and sharding:
                legend.setdefault(color_of(sharding), set()).add(sharding)
    return {color: sorted(shardings) for color, shardings in legend.items()}


def counted(records: Sequence[Collective]) -> str:
    """Return a text such as `2 all_reduce, 1 all_gather`."""
    return counted_kinds(record.kind for record in records)


def wire(records: Sequence[Collective]) -> int:
    return sum(record.wire_bytes for record in records)


def sent(item: Item) -> list[object] | None:
    """Return the properties that equal collectives have in common."""
    record = item.record
    return [record.kind, record.axis, record.payload_bytes, record.wire_bytes, record.why] if record else None


def _tree(items: Sequence[Item], path: str = "", depth: int = 0) -> Group:
    """Put every item into the group of its innermost module's call; a group is placed at its first item."""
    members: list[Item | Module] = []
    inside: dict[Module, list[Item]] = {}
    for item in items:
        if len(item.modules) == depth:
            members.append(item)
            continue
        child = item.modules[depth]
        if child not in inside:
            inside[child] = []
            members.append(child)
        inside[child].append(item)
    children = (_tree(inside[m], m.path, depth + 1) if isinstance(m, Module) else m for m in members)
    return Group(path, tuple(children), title=path)


def _folded(group: Group, stands: Stands) -> Group:
    """Merge consecutive layers, and consecutive calls of one, that are equal except for names."""
    members: list[Item | Group] = []
    for member in group.members:
        if isinstance(member, Group):
            member = _folded(member, stands)
            last = members[-1] if members else None
            both = _both(last, member) if isinstance(last, Group) else None
            if isinstance(last, Group) and both and _structure(last, stands) == _structure(member, stands):
                stands.update(zip((i.name for i in member.items()), (i.name for i in last.items()), strict=True))
                members[-1] = both
                continue
        members.append(member)
    lists = Counter(numbered(m.path)[0] for m in members if isinstance(m, Group))
    for at, member in enumerate(members):
        if isinstance(member, Group) and member.count > 1:
            members[at] = replace(member, title=_title(member, whole=lists[numbered(member.path)[0]] == 1))
    return replace(group, members=tuple(members))


def _both(first: Group, after: Group) -> Group | None:
    """Return `first` with `after` as one more: the next layer, the one before as in a backward, or one more call."""
    if first.path == after.path:
        return replace(first, count=first.count + 1, calls=first.calls + 1) if first.calls == first.count else None
    (name, number), (other, following) = numbered(first.path), numbered(after.path)
    step = first.step if first.count > 1 else following - number
    is_next = first.calls == 1 and name == other and number >= 0 and following == number + step * first.count
    return replace(first, count=first.count + 1, step=step) if is_next and abs(step) == 1 else None


def _title(group: Group, whole: bool) -> str:
    if group.calls > 1:
        return f"{group.path}, called {group.calls} times"
    name, first = numbered(group.path)
    which = "*" if whole else f"{first}-{first + group.step * (group.count - 1)}"
    return f"{name}.{which} x {group.count}".removeprefix(".")


def _structure(group: Group, stands: Stands) -> Any:
    """Return everything about a group except the names of its items, its path, and its sources outside."""
    items = list(group.items())
    place = {item.name: at for at, item in enumerate(items)}
    rows = []
    for item in items:
        rows.append(
            (
                (item.kind, item.ops, item.sharding, item.value),
                [seen_from(group.path, module.path) for module in item.modules],
                [replace(leaf, name=_told(leaf.name, group.path)) for leaf in (*item.leaves, *item.writes)],
                len(item.writes),
                sent(item),
                item.before and (item.was, [leaf.sharding for leaf in item.before.leaves], sent(item.before)),
                {place.get(_stand(source, stands)) for source in item.sources},
            )
        )
    return rows, _counts(group)


def _told(name: str, path: str) -> str:
    """Return a leaf's name in any of several equal layers: `weight`, or `key_cache_*` for one outside of `layers.3`."""
    number = numbered(path)[1]
    inside = seen_from(path, name)
    return inside if inside != name or number < 0 else re.sub(rf"(?<=[._]){number}(?=[._]|$)", "*", name)


def _counts(group: Group) -> Any:
    return [(member.count, _counts(member)) for member in group.members if isinstance(member, Group)]


def _stand(name: str, stands: Stands) -> str:
    while name in stands:
        name = stands[name]
    return name


def _merged_ends(root: Group, items: Sequence[Item], stands: Stands) -> Group:
    """Merge inputs with the same readers, and outputs with the same source."""
    readers: dict[str, set[str]] = {}
    for item in items:
        for source in item.sources:
            readers.setdefault(source, set()).add(_stand(item.name, stands))
    members: list[Item | Group] = []
    place: dict[Any, int] = {}
    for member in root.members:
        if isinstance(member, Item) and member.kind in ("input", "output"):
            sources = tuple(_stand(source, stands) for source in member.sources)
            read_by = frozenset(readers.get(member.name, ()))
            leaves = member.leaves, member.writes
            key = (member.kind, member.sharding, member.was, member.value, sources, leaves, read_by)
            if key in place:
                first = members[place[key]]
                assert isinstance(first, Item)
                stands[member.name] = first.name
                members[place[key]] = replace(first, ops=first.ops + member.ops)
                continue
            place[key] = len(members)
        members.append(member)
    return replace(root, members=tuple(members))


def _redirected(group: Group, stands: Stands) -> Group:
    """Replace sources that are hidden by the items that are drawn for them."""

    def redirect(member: Item | Group) -> Item | Group:
        if isinstance(member, Group):
            return _redirected(member, stands)
        sources = dict.fromkeys(_stand(source, stands) for source in member.sources)
        return replace(member, sources=tuple(source for source in sources if source != member.name))

    return replace(group, members=tuple(map(redirect, group.members)))


def _flattened(group: Group, framed: bool = False) -> Group:
    """Keep the groups that help the reader: layers, and one level of modules inside a layer or outside all layers."""
    members: list[Item | Group] = []
    for member in group.members:
        if isinstance(member, Item):
            members.append(member)
        elif _is_layer(member) or (not framed and _size(member) >= FEWEST):
            members.append(_flattened(member, framed=not _is_layer(member)))
        else:
            members.extend(_flattened(member, framed).members)
    return replace(group, members=tuple(members))


def _is_layer(group: Group) -> bool:
    return group.count > 1 or (numbered(group.path)[1] >= 0 and _size(group) > 1) or group.path == BACKWARD.path


def _size(group: Group) -> int:
    """Return the number of ops in a group, counting a layer as one."""
    sizes = (_size(m) if isinstance(m, Group) and not _is_layer(m) else 1 for m in group.members if not _is_sent(m))
    return sum(sizes)


def _is_sent(member: Item | Group) -> bool:
    return isinstance(member, Item) and member.kind in ("collective", "gone")


BACKWARD = Module("backward", "backward")


def put_backward_last(items: Sequence[Item], exported: ExportedProgram) -> list[Item]:
    """Put what only gradients need behind everything else but the outputs, into a module `backward`."""
    output: Any = exported.graph.output_node().args[0]
    kinds = [spec.kind for spec in exported.graph_signature.output_specs]
    if not any(kind in GRADIENT_KINDS for kind in kinds):
        return list(items)
    own = (value for value, kind in zip(output, kinds, strict=True) if kind not in GRADIENT_KINDS)
    forward = {node.name for node in edit.nodes_behind(own)}
    first, backward, last = list[Item](), list[Item](), list[Item]()
    layer: tuple[Module, ...] = ()
    for item in items:
        if item.kind == "output":
            last.append(item)
        elif item.kind == "input" or item.name in forward:
            first.append(item)
        else:
            modules = item.modules or layer  # torch adds up gradients outside of modules, behind those of a layer
            numbers = [numbered(each.path)[1] for each in modules]
            layer = modules[: 1 + max((at for at, number in enumerate(numbers) if number >= 0), default=-1)]
            backward.append(replace(item, modules=(BACKWARD, *modules)))
    return [*first, *backward, *last]


def with_before(items: Sequence[Item], first: Iterable[Item]) -> list[Item]:
    """Return the items with `before` set to the first program's item with the same value; call before joining.

    Collectives match if they are of one kind and change one value. A collective of the first program without a match
    becomes an item of kind "gone".
    """
    same: dict[tuple[str, str], deque[Item]] = defaultdict(deque)
    for item in items:
        same[_key(item)].append(item)
    before: dict[str, Item] = {}
    gone: dict[str, list[Item]] = defaultdict(list)  # after the item that they follow, "" for the start
    names: dict[str, str] = {}  # name in the first program -> name in this one
    last = ""
    for old in first:
        if now := same[_key(old)]:
            last = names[old.name] = now.popleft().name
            before[last] = old
        elif old.kind == "collective":
            names[old.name] = f"gone {old.name}"  # no node has a space in its name
            sources = tuple(names[source] for source in old.sources if source in names)
            gone[last].append(
                replace(
                    old,
                    name=names[old.name],
                    kind="gone",
                    record=None,
                    sources=sources,
                    leaves=(),
                    writes=(),
                    before=old,
                )
            )
    merged = gone[""]
    for item in items:
        merged += [replace(item, before=before.get(item.name)), *gone[item.name]]
    return merged


def _key(item: Item) -> tuple[str, str]:
    return item.ops[0] if item.kind == "collective" else item.kind, item.origin

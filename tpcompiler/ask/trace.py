"""A trace of one call for Perfetto or Chrome: what every rank did when, by the names of its graph."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import fx
from torch.profiler import ProfilerActivity, profile, record_function

from tpcompiler.artifact.collective_records import sent_values
from tpcompiler.cost.collective import wire_bytes
from tpcompiler.ir import edit
from tpcompiler.ir.symm_mem import is_fitted
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import Collective, plain_data

Trace = dict[str, Any]  # as torch writes it: `traceEvents`, at microseconds after `baseTimeNanoseconds`


class _Spans:
    """Calls between a program's ops that mark its position for the profiler."""

    def __init__(self) -> None:
        self.around: list[record_function] = []
        self.payload_bytes: dict[str, int] = {}

    def enter(self, name: str) -> None:
        self.around.append(record_function(name))
        self.around[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        self.around.pop().__exit__(None, None, None)

    def send(self, name: str, values: Sequence[torch.Tensor]) -> None:
        self.payload_bytes[name] = sum(value.numel() * value.element_size() for value in values)


@contextmanager
def traced(module: fx.GraphModule, manifest: Manifest) -> Iterator[Trace]:
    """Trace one call of a loaded module on this rank; the trace is complete when the block ends.

    In addition to torch's own events, it has a span around the ops of each module, and one around each collective and
    its wait, with the manifest's record of it and the bytes that were sent.
    """
    spans, records, trace = _Spans(), _records(module.graph, manifest), Trace()
    _insert_spans(module, records, spans)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as profiler:
        try:
            yield trace
        finally:
            while spans.around:  # it has failed
                spans.leave()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace.update(json.loads(file.read_text(encoding="utf-8")))
    told = {_label(record): _told(record, spans.payload_bytes) for record in records.values()}
    for event in trace["traceEvents"]:
        if event["name"] in told:
            record = told[event["name"]]
            event |= {"name": f"{record.kind} {record.module}".strip(), "args": plain_data(record)}


def gather_traces(own: Trace) -> Trace | None:
    """The traces of all ranks as one, on rank 0; None on the others."""
    found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, found)
    return None if found is None else merge_traces(found)


def merge_traces(traces: Sequence[Trace]) -> Trace:
    """One trace with a process for each rank, from its first event on; clocks of several hosts are taken as they are.

    Perfetto drops an event that ends a nanosecond after the one around it, so times are added as whole nanoseconds.
    """
    # Numbers are of a process or a device; texts are for what the profiler says of itself.
    kept = [
        (rank, trace["baseTimeNanoseconds"] + round(event["ts"] * 1000), event)
        for rank, trace in enumerate(traces)
        for event in trace["traceEvents"]
        if isinstance(event["pid"], int) and not event["name"].startswith("process_")
    ]
    first = min(at for _, at, _ in kept)
    events: list[Any] = [
        {"ph": "M", "name": f"process_{name}", "pid": rank, "args": {name: said}}
        for rank in range(len(traces))
        for name, said in (("name", f"rank {rank}"), ("sort_index", rank))
    ]
    for rank, at, event in kept:
        events.append({**event, "pid": rank, "ts": (at - first) / 1000})
        if "id" in event:  # of an arrow between two events
            events[-1]["id"] = event["id"] * len(traces) + rank
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": first, "traceEvents": events}


def _records(graph: fx.Graph, manifest: Manifest) -> dict[fx.Node, Collective]:
    """The manifest's record of each collective; an op over symmetric memory stands for one."""
    nodes = [node for node in edit.calls(graph) if edit.is_collective(node) or is_fitted(node)]
    return dict(zip(nodes, manifest.collectives, strict=True))


def _insert_spans(module: fx.GraphModule, records: Mapping[fx.Node, Collective], spans: _Spans) -> None:
    """Make the program report when it enters and leaves a module, a collective, and a wait that follows later."""
    graph: fx.Graph = module.graph
    around: list[str] = []
    (output,) = graph.find_nodes(op="output")
    labels = {node: _label(record) for node, record in records.items()}
    for start, record in records.items():
        waits = (wait for wait in edit.waits_of(start) if wait is not start.next)
        labels |= dict.fromkeys(waits, f"wait for {record.kind} {record.module}".strip())
    for node in [*edit.calls(graph), output]:
        has_module = "nn_module_stack" in node.meta and not edit.is_wait(node)
        inside = [] if node is output else edit.module_paths(node) if has_module else around
        pairs = zip(around, inside, strict=False)
        shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        with graph.inserting_before(node):
            for _ in around[shared:]:
                graph.call_function(spans.leave)
            for path in inside[shared:]:
                graph.call_function(spans.enter, (path,))
            if node in labels:
                graph.call_function(spans.enter, (labels[node],))
        around = inside
        if node in labels:
            last = node.next if node in records and edit.is_wait(node.next) else node
            with graph.inserting_after(last):
                graph.call_function(spans.leave)
                if edit.is_collective(node):
                    graph.call_function(spans.send, (_label(records[node]), sent_values(node)))
    module.recompile()


def _label(record: Collective) -> str:
    """The name of a collective's span until the trace is read back."""
    return f"tpcompiler {record.node}"


def _told(record: Collective, sent: Mapping[str, int]) -> Collective:
    """Return the manifest's facts of a collective, at the sizes of the call."""
    payload = sent.get(_label(record), record.payload_bytes)
    wire = wire_bytes(record.kind, payload, record.group_size)
    if record.kind == "all_to_all" and record.wire_bytes == record.payload_bytes:  # an exchange of edges keeps nothing
        wire = payload
    return replace(record, payload_bytes=payload, wire_bytes=wire)

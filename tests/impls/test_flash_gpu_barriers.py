"""The Mosaic GPU kernels as schedules: in no order of events does a warpgroup wait for ever.

The kernel runs in plain Python, once for each warpgroup of each program, and what it does with barriers is written
down. A model of a GPU's barriers, whose phase is one bit, then goes through every order in which these events and the
ends of copies can follow each other. JAX's interpreter goes through one order a run, and hangs where one is missing.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from _pytest.mark import ParameterSet
from jax.experimental.pallas import mosaic_gpu as plgpu

from cases.masks import Causal, Full, Lengths, Mask, Window
from impls import flash_gpu
from impls.flash_gpu.block_sizes import Kernel
from impls.flash_gpu.mosaic import backward, backward_tiles, forward, mosaic_launch, split_dkv
from impls.flash_gpu.mosaic.forward import TensorCoreTurns
from impls.flash_gpu.mosaic.mosaic_launch import COMPUTE_WARPGROUPS
from impls.flash_gpu.tile_schedule import FlashGpuPlan, Operands, QueryRows


@dataclasses.dataclass(frozen=True)
class Event:
    """A warpgroup waits at a barrier, arrives there, starts a copy that will arrive, or does something without one."""

    kind: str
    barrier: tuple[str, int] = ("", 0)


Events = list[Event]
Arrivals = dict[str, int]
"""How many arrivals complete a phase, by the barrier's name."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """Stands in for memory, which holds zeros, and for barriers."""

    name: str
    dtype: Any = jnp.float32
    place: Any = 0

    @property
    def at(self) -> Reference:
        return self

    @property
    def shape(self) -> tuple[int, int]:
        return (1, 1)

    def __getitem__(self, place: Any) -> Any:
        return jnp.float32(0) if place is Ellipsis else dataclasses.replace(self, place=place)

    def __setitem__(self, place: Any, value: Any) -> None:
        pass


class ListOrOperand(np.ndarray):
    """An int32 input: a list, which is read, or segment ids, of which tiles are copied."""

    @property
    def at(self) -> Reference:
        return Reference("operand", self.dtype)


class Machine:
    """Stands in for Pallas: what is done with barriers is written down, and nothing is computed."""

    def __init__(self) -> None:
        self.events: Events = []
        self.where: dict[str, int] = {}

    def modules(self) -> dict[str, Any]:
        """By the names that the kernel's modules have for them."""
        return {
            "pl": types.SimpleNamespace(
                when=lambda some: lambda body: body() if some else None, ds=lambda start, size: (start, size)
            ),
            "lax": types.SimpleNamespace(
                fori_loop=_loop,
                optimization_barrier=lambda values: values,
                div=lambda a, b: int(a) // int(b),
                rem=lambda a, b: int(a) % int(b),
                axis_index=lambda axis: self.where[axis],
            ),
            "plgpu": types.SimpleNamespace(
                SMEM=plgpu.SMEM,
                Barrier=plgpu.Barrier,
                barrier_wait=functools.partial(self.note, "wait"),
                barrier_arrive=functools.partial(self.note, "arrive"),
                copy_gmem_to_smem=lambda source, target, barrier: self.note("copy", barrier),
                copy_smem_to_gmem=lambda source, target: self.events.append(Event("store")),
                wait_smem_to_gmem=lambda count, **known: self.events.append(Event("stored")),
                **dict.fromkeys(("commit_smem", "set_max_registers"), lambda *given, **known: None),
            ),
        }

    def note(self, kind: str, barrier: Reference) -> None:
        self.events.append(Event(kind, (barrier.name, int(barrier.place))))


def _loop(start: Any, stop: Any, body: Callable[[int, Any], Any], carry: Any) -> Any:
    for at in range(int(start), int(stop)):
        carry = body(at, carry)
    return carry


def programs(plan: FlashGpuPlan, operands: Operands, kernel: Kernel = "forward") -> tuple[list[list[Events]], Arrivals]:
    """Record the barrier events of each warpgroup of each program of a kernel."""
    machine = Machine()
    found: list[list[Events]] = []
    arrivals: Arrivals = {}

    def call(body: Callable[..., None], *, grid: Any, warpgroups: int, outputs: Any, scratch: Any, **_: Any) -> Any:
        def run(*inputs: Any) -> tuple[Any, ...]:
            arrivals.update({name: x.num_arrivals for name, x in scratch.items() if hasattr(x, "num_arrivals")})
            # Lists of tiles and of blocks are read; of operands only the dtype.
            given = [
                np.asarray(x).view(ListOrOperand) if x.dtype == jnp.int32 else Reference("operand", x.dtype)
                for x in inputs
            ]
            shared = {name: Reference(name, getattr(x, "dtype", None)) for name, x in scratch.items()}
            for program in range(grid["program"]):
                found.append([])
                for warpgroup in range(warpgroups):
                    machine.events, machine.where = [], {"program": program, "warpgroup": warpgroup}
                    body(*given, *(Reference("output", x.dtype) for x in outputs), **shared)
                    found[-1].append(machine.events)
            return tuple(jnp.zeros(x.shape, x.dtype) for x in outputs)

        return run

    def multiplied(*given: Any, issued: Callable[[], None] = lambda: None, **known: Any) -> Any:
        issued()
        return jnp.zeros((1, 1), jnp.float32)

    with pytest.MonkeyPatch.context() as patch:
        for module in (forward, backward, backward_tiles, split_dkv, mosaic_launch):
            for name, stand_in in machine.modules().items():
                if hasattr(module, name):
                    patch.setattr(module, name, stand_in)
        patch.setattr(mosaic_launch, "build_mosaic_call", call)
        patch.setattr(mosaic_launch, "mark_varying", lambda found, axes: found)
        zero = jnp.float32(0)
        for module in (forward, backward, split_dkv):
            for name, stand_in in {
                "multiply": multiplied,
                "accumulate": multiplied,
                "compute_logits": lambda plan, z: (z, None),
                "prepare_allowed": lambda place, at, slot: lambda keys_first: True,
                "compute_allowed_keys": lambda *given: True,
                "broadcast_over_keys": lambda x, keys: x,
                "broadcast_over_queries": lambda x, keys: x,
                "zero_unseen_rows": lambda v, seen: v,
                "update_softmax": lambda plan, softmax, z, masked: (softmax, z),
                "convert_sinks": lambda sink: zero,
            }.items():
                if hasattr(module, name):
                    patch.setattr(module, name, stand_in)
        if kernel == "forward":
            forward.forward(plan, operands)
        else:
            ones = jnp.zeros((operands.q.shape[0], plan.num_q_heads, plan.q_length), jnp.float32)
            rows = QueryRows(jnp.zeros_like(operands.q), ones, ones)
            {"dq": backward.compute_dq, "dkv": backward.compute_dkv}[kernel](plan, operands, rows)
    return found, arrivals


def stuck(warpgroups: Sequence[Events], arrivals: Arrivals) -> str | None:
    """Describe the first order of events that fails: a warpgroup waits forever, or misses a phase of a barrier."""
    copies = [[n for n, event in enumerate(events) if event.kind == "copy"] for events in warpgroups]
    start = (tuple(0 for _ in warpgroups), frozenset[tuple[int, int]]())
    todo, known = [start], {start}
    waits = [_running(events, "wait") for events in warpgroups]
    arrived = [_running(events, "arrive") for events in warpgroups]
    barriers = {event.barrier for events in warpgroups for event in events if event.barrier[0]}
    while todo:
        at, in_flight = todo.pop()
        begun = [(w, n) for w, places in enumerate(copies) for n in places if n < at[w]]
        landed = collections.Counter(warpgroups[w][n].barrier for w, n in begun if (w, n) not in in_flight)
        count = {b: landed[b] + sum(arrived[w][at[w]][b] for w in range(len(at))) for b in barriers}
        phase = {b: n // arrivals[b[0]] for b, n in count.items()}
        for b in barriers:
            for w, events in enumerate(warpgroups):
                if any(e.kind == "wait" and e.barrier == b for e in events) and phase[b] > waits[w][at[w]][b] + 1:
                    return f"warpgroup {w} misses a phase of {b} at {at}"
        following = [(at, in_flight - {copy}) for copy in in_flight]
        for w, events in enumerate(warpgroups):
            if at[w] == len(events):
                continue
            event, moved = events[at[w]], (*at[:w], at[w] + 1, *at[w + 1 :])
            if event.kind == "copy":
                following.append((moved, in_flight | {(w, at[w])}))
            elif event.kind != "wait" or (phase[event.barrier] - waits[w][at[w]][event.barrier]) % 2:
                following.append((moved, in_flight))
        if not following:
            if any(n < len(events) for n, events in zip(at, warpgroups, strict=True)):
                return f"at {at} everybody waits"
            if left := [b for b in barriers if count[b] % arrivals[b[0]] or not _seen(b, phase[b], warpgroups)]:
                return f"at the end {left} are not in their first state"
        todo += (new := set(following) - known)
        known |= new
    return None


def _running(events: Events, kind: str) -> list[collections.Counter[tuple[str, int]]]:
    """Count the events of this kind at each barrier before each index."""
    found = [collections.Counter[tuple[str, int]]()]
    for event in events:
        found.append(found[-1] + collections.Counter([event.barrier] if event.kind == kind else []))
    return found


def _seen(barrier: tuple[str, int], phases: int, warpgroups: Sequence[Events]) -> bool:
    waits = [sum(e == Event("wait", barrier) for e in events) for events in warpgroups]
    return all(count in (0, phases) for count in waits)


def asked(
    mask: Mask,
    ring: flash_gpu.Ring,
    lengths: tuple[int, int],
    batch: int = 1,
    kernel: Kernel = "forward",
    depth: int = 64,
    *,
    segmented: bool = False,
) -> tuple[list[list[Events]], Any]:
    """Record the schedule of a call with one head."""
    q_length, kv_length = lengths
    rings: dict[str, Any] = {f"mosaic_{kernel}": ring}
    sizes = dataclasses.replace(flash_gpu.block_sizes.TABLE[0].sizes, **rings)
    plan = FlashGpuPlan(
        mask=mask,
        num_q_heads=1,
        num_kv_heads=1,
        q_length=q_length,
        kv_length=kv_length,
        head_dim=depth,
        v_head_dim=depth,
        scale=1.0,
        soft_cap=None,
        segmented=segmented,
        exact=True,
        sizes=sizes,
        interpret=True,
    )
    q, k = (jnp.zeros((batch, n, 1, depth), jnp.bfloat16) for n in lengths)
    q_ids, kv_ids = (jnp.zeros((batch, n), jnp.int32) for n in lengths)
    return programs(plan, Operands(q, k, k, None, None, (q_ids, kv_ids) if segmented else None), kernel)


TURNS = {
    "plain": flash_gpu.Ring(),
    "both": flash_gpu.Ring(ping_pong=True, persistent=True),
    "ping_pong": flash_gpu.Ring(ping_pong=True),
    "persistent": flash_gpu.Ring(persistent=True),
    "early": flash_gpu.Ring(early_copies=True, num_v_stages=1),
    "early_persistent": flash_gpu.Ring(early_copies=True, persistent=True, num_q_stages=2),
    "all": flash_gpu.Ring(ping_pong=True, persistent=True, early_copies=True, num_q_stages=2),
    "one tile of values": flash_gpu.Ring(ping_pong=True, persistent=True, early_copies=True, num_v_stages=1),
}
CALLS: dict[str, tuple[Mask, tuple[int, int], int]] = {
    "causal": (Causal(), (384, 384), 1),
    "window": (Window(95, 0), (384, 384), 1),
    "full": (Full(), (250, 200), 1),
    "no key of one": (Lengths((0, 200)), (128, 256), 2),
}


def pair(rings: Iterable[str]) -> list[ParameterSet]:
    """Pair rings and calls: by day each ring with one call, not that of the ring before it; the rest at night."""
    return [
        pytest.param(ring, call, marks=[pytest.mark.nightly] * (number % len(CALLS) != place))
        for (number, ring), (place, call) in itertools.product(enumerate(rings), enumerate(CALLS))
    ]


@pytest.mark.parametrize(("ring", "call"), pair(TURNS))
def test_no_order_of_events_ends_in_waiting(ring: str, call: str) -> None:
    mask, lengths, batch = CALLS[call]
    found, arrivals = asked(mask, TURNS[ring], lengths, batch)
    assert any(event.kind == "wait" for events in found[0] for event in events)
    for warpgroups in found:
        assert stuck(warpgroups, arrivals) is None
        steps = [sum(e.kind == "arrive" and e.barrier[0] == "free" for e in events) for events in warpgroups]
        assert steps[0] == steps[1]  # on which the turns rest


@pytest.mark.parametrize("ring", ["all", "one tile of values"])
def test_no_order_of_events_ends_in_waiting_where_keys_have_segment_ids(ring: str) -> None:
    """Keys are then released after the last read of their ids."""
    found, arrivals = asked(Full(), TURNS[ring], (128, 200), segmented=True)
    assert arrivals["k_arrived"] == 2
    assert [stuck(warpgroups, arrivals) for warpgroups in found] == [None] * len(found)


def test_one_tile_of_keys_and_turns_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    early = flash_gpu.Ring(early_copies=True, num_stages=1)
    with pytest.raises(ValueError, match=r"num_stages must be at least 2, or 1 with .* ping_pong=False"):
        dataclasses.replace(early, ping_pong=True)
    monkeypatch.setattr(flash_gpu.Ring, "__post_init__", lambda self: None)
    found, arrivals = asked(Full(), dataclasses.replace(early, ping_pong=True), (128, 200), segmented=True)
    assert "everybody waits" in (stuck(found[0], arrivals) or "")


BACKWARD: dict[str, tuple[Kernel, int, flash_gpu.Ring]] = {
    "dq": ("dq", 64, flash_gpu.Ring()),
    "dq_early": ("dq", 64, flash_gpu.Ring(early_copies=True, num_v_stages=1)),
    "dq_one_tile": ("dq", 64, flash_gpu.Ring(early_copies=True, num_stages=1)),
    "dkv": ("dkv", 64, flash_gpu.Ring()),
    "dkv_split": ("dkv", 256, flash_gpu.Ring()),
}


@pytest.mark.parametrize(("name", "call"), pair(BACKWARD))
def test_no_order_of_events_of_a_backward_kernel_ends_in_waiting(name: str, call: str) -> None:
    kernel, depth, ring = BACKWARD[name]
    mask, lengths, batch = CALLS[call]
    found, arrivals = asked(mask, ring, lengths, batch, kernel, depth)
    assert any(event.kind == "wait" for events in found[0] for event in events)
    assert [stuck(warpgroups, arrivals) for warpgroups in found] == [None] * len(found)


@pytest.mark.parametrize("barrier", ["weights_ready", "weights_free"])
def test_weights_that_are_not_passed_on_are_noticed(barrier: str) -> None:
    (warpgroups, *_), arrivals = asked(Full(), flash_gpu.Ring(), (128, 128), kernel="dkv", depth=256)
    assert stuck(warpgroups, arrivals) is None
    kept = [[event for event in events if event != Event("arrive", (barrier, 0))] for events in warpgroups]
    assert "everybody waits" in (stuck(kept, arrivals) or "")


def test_queries_of_the_next_tile_come_while_this_one_is_computed() -> None:
    """The fetching warpgroup copies them, so its copies are ahead of the computing warpgroups' last waits."""
    found, _ = asked(Causal(), TURNS["all"], (512, 512))
    fetching = [events for program in found for events in program[COMPUTE_WARPGROUPS:]]
    copies = [sum(e.kind == "copy" and e.barrier[0] == "q_arrived" for e in events) for events in fetching]
    assert sum(copies) == 4 * COMPUTE_WARPGROUPS  # 4 tiles of 128 queries
    for events in itertools.chain.from_iterable(program[:COMPUTE_WARPGROUPS] for program in found):
        assert not any(event.kind == "copy" for event in events)
        released = [n for n, event in enumerate(events) if event.barrier[0] == "q_free"]
        stored = [n for n, event in enumerate(events) if event.kind == "stored"]
        assert all(any(n < place for n in stored) for place in released)


def test_queries_come_once_results_in_their_place_are_gone() -> None:
    """Nothing interprets these waits: JAX's interpreter copies results at once."""
    found, _ = asked(Causal(), TURNS["both"], (512, 512))
    for events in itertools.chain.from_iterable(program[:COMPUTE_WARPGROUPS] for program in found):
        under_way = False
        for event in events:
            assert not (under_way and event.kind == "copy")
            under_way = event.kind == "store" or (under_way and event.kind != "stored")
        assert not under_way
    assert max(sum(e.kind == "copy" for e in program[0]) for program in found) > 1


@pytest.mark.parametrize(
    ("left_out", "words"),
    [("begin", "everybody waits"), ("end", "not in their first state"), ("give", "everybody waits")],
)
def test_what_is_left_out_of_the_turns_is_noticed(left_out: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorCoreTurns, left_out, lambda self: None)
    found, arrivals = asked(Causal(), TURNS["ping_pong"], (128, 128))
    assert words in (stuck(found[0], arrivals) or "")


def test_a_slot_that_one_warpgroup_keeps_is_noticed() -> None:
    (warpgroups, *_), arrivals = asked(Full(), TURNS["plain"], (128, 256))
    kept = [event for event in warpgroups[0] if event.kind != "arrive"]
    assert "everybody waits" in (stuck([kept, *warpgroups[1:]], arrivals) or "")


def turns_of(mine: int, tiles: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> Events:
    """Record the barrier events of a warpgroup's turns, for tiles with these numbers of steps."""
    machine = Machine()
    for name, stand_in in machine.modules().items():
        if hasattr(forward, name):
            monkeypatch.setattr(forward, name, stand_in)
    found = TensorCoreTurns(mine, Reference("turn"))
    found.begin()
    for steps in tiles:
        for _ in range(steps + 1 if steps else 0):
            found.take()
            found.give()
    found.end()
    return machine.events


def test_turns_end_if_and_only_if_both_take_equally_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each pair of numbers of steps of two tiles, that of a warpgroup which has nothing to do among them."""
    tiles = list(itertools.product(range(4), repeat=2))
    events = {
        (mine, counts): turns_of(mine, counts, monkeypatch) for mine in range(COMPUTE_WARPGROUPS) for counts in tiles
    }

    def taken(counts: tuple[int, ...]) -> int:
        return sum(steps + 1 for steps in counts if steps)

    for first, second in itertools.product(tiles, tiles):
        ends = stuck([events[0, first], events[1, second]], {"turn": 1}) is None
        assert ends == (taken(first) == taken(second))

"""Replace the function in a process of the suite: by itself, by correct attention, or by a wrong one."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib.util
import inspect
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cases.masks import Causal, Dense, Indexer, Mask, Window
from conformance.mutation import mutant_list
from conformance.mutation.calls import AttentionCall, CannotRead, Reading, build_indexer, find_reading, read_call
from impls.contract.implementation import Implementation

Array = Any
_inside = contextvars.ContextVar("_inside", default=False)
_LARGEST = 64 * 2**20  # bytes of the operands of a call that is kept
DTYPE_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""The dtypes of queries in which calls are compared with exact results, and how cases name them."""
_KEPT = 3  # calls kept in a process for each set of sizes and options


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """A call that the suite made, with the values of its operands.

    Attributes:
      call: the call; its arrays are NumPy's.
      residuals: whether a residual was returned.
      differentiated: the operands with respect to which the call was differentiated.
      empty_rows: whether the function returns zeros for queries that may attend to nothing.
      test: the test that made it, if pytest ran it.
    """

    call: AttentionCall
    residuals: bool
    differentiated: tuple[str, ...]
    empty_rows: bool
    test: str


def replace_function(module: Any, settings: Mapping[str, Any]) -> None:
    """Replace the attribute of a module that `settings["replace"]` names, and other names of it in that module."""
    path = settings["replace"].partition(":")[2]
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, module)
    true = inspect.getattr_static(owner, name)
    replaced = build_replacement(getattr(owner, name) if isinstance(true, staticmethod) else true, settings)
    setattr(owner, name, staticmethod(replaced) if isinstance(true, staticmethod) else replaced)
    for other, value in list(vars(owner).items()):
        if value is true and other != name:
            setattr(owner, other, replaced)
    for value in vars(module).values():
        _replace_defaults(getattr(value, "__init__", None) if isinstance(value, type) else value, true, replaced)


def _replace_defaults(function: Any, true: Any, replaced: Any) -> None:
    """Replace the function where it is the default of a parameter, as of flax's `attention_fn`."""
    function = inspect.unwrap(function) if inspect.isfunction(function) else None
    if function is None or function is true:
        return
    if function.__defaults__ and any(x is true for x in function.__defaults__):
        function.__defaults__ = tuple(replaced if x is true else x for x in function.__defaults__)
    for name, x in (function.__kwdefaults__ or {}).items():
        if x is true:
            function.__kwdefaults__[name] = replaced


def build_replacement(true: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Build what takes the place of the true function."""
    run = _Run(settings)
    call = load_through(settings["through"])[0] if settings.get("through") else _Translation(true, run)

    @functools.wraps(true, updated=())
    def replaced(*arguments: Any, **options: Any) -> Any:
        if _inside.get():
            return true(*arguments, **options)
        if run.mode == "true":
            run.note()
            with _enter():
                return true(*arguments, **options)
        if isinstance(call, _Translation):
            return call(*arguments, **options)
        with _enter():
            return call(run.attend_plainly, true, *arguments, **options)

    return replaced


@contextlib.contextmanager
def _enter() -> Iterator[None]:
    """Within it, the replaced function is the true one, which may call itself."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def load_through(place: str) -> tuple[Callable[..., Any], Any]:
    """Load `file.py:name`; return the function and its module."""
    path, _, name = place.rpartition(":")
    spec = importlib.util.spec_from_file_location("conformance_through", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name), module


class _Translation:
    """Calls of the true function, read as calls of the contract."""

    def __init__(self, true: Callable[..., Any], run: _Run) -> None:
        self.true, self.run = true, run
        self.signature = inspect.signature(true)
        parameters = self.signature.parameters.values()
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.operands = mutant_list.find_operands(self.signature)
        self.readings: dict[Any, Reading | str] = _read_readings(run.folder.parent / "right")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        bound = self.signature.bind(*arguments, **options)
        bound.apply_defaults()
        named = {name: bound.arguments[name] for name in self.operands}
        others = {name: x for name, x in bound.arguments.items() if name not in named and name != "self"}
        for parameter in self.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                others |= others.pop(parameter.name, {})
        named |= others
        reading = self._find_reading(named, bound)
        if isinstance(reading, str):
            self.run.note(reading)
            with _enter():
                return self.true(*arguments, **options)
        call = read_call(named, self.defaults, reading)
        results = self.run.attend(call, residuals=reading.wants_residuals, empty_rows=reading.empty_rows)
        # What the contract does not know is the true function's own.
        with _enter():
            if reading.is_whole:
                like = jax.eval_shape(lambda: self.true(*arguments, **options))
            else:
                like = self.true(*arguments, **options)
        leaves, structure = jax.tree.flatten(like)
        pairs = zip(leaves, reading.outputs, strict=True)
        return jax.tree.unflatten(structure, [x if o is None else o.write(results, x) for x, o in pairs])

    def _find_reading(self, named: dict[str, Any], bound: inspect.BoundArguments) -> Reading | str:
        key = tuple((name, *map(_describe, jax.tree.leaves(value))) for name, value in named.items())
        if key not in self.readings:

            def call_true(drawn: Mapping[str, Any]) -> Any:
                again = inspect.BoundArguments(self.signature, dict(bound.arguments))
                again.arguments.update({n: x for n, x in drawn.items() if n in again.arguments})
                return self.true(*again.args, **again.kwargs)

            try:
                with _enter(), jax.core.eval_context():  # a kernel that is interpreted does not fold constants
                    self.readings[key] = find_reading(call_true, named, self.defaults, self.run.right)
            except CannotRead as error:
                self.readings[key] = str(error)
            if self.run.mode == "right":  # wrong functions need not look for it again
                with (self.run.folder / f"reading-{os.getpid()}-{len(self.readings):05d}.pickle").open("wb") as file:
                    pickle.dump((key, self.readings[key]), file)
        return self.readings[key]


def _read_readings(folder: Path) -> dict[Any, Reading | str]:
    """Read the readings that the processes of a run have found."""
    return dict(pickle.loads(path.read_bytes()) for path in sorted(folder.glob("reading-*.pickle")))


def _describe(x: Any) -> Any:
    return (np.shape(x), str(x.dtype)) if hasattr(x, "dtype") else repr(x)


class _Run:
    """Runs the function that stands for the true one in a process of the suite, and notes its calls in files."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.mode: str = settings["mode"]
        self.folder = Path(settings["folder"])
        self.right = mutant_list.build_right(by_hand=settings.get("by_hand", True))
        self.implementation = self.right
        if self.mode not in ("true", "right"):
            self.implementation = mutant_list.find_mutant(self.mode).build()
        self.counts: dict[Any, int] = {}
        self.noted: set[tuple[str, str]] = set()

    def note(self, reason: str = "") -> None:
        """Note a call of the function by the running test, and why it was left as it is."""
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        if (test, reason) in self.noted:
            return
        self.noted.add((test, reason))
        with (self.folder / f"events-{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"test": test, "reason": reason}) + "\n")

    def attend(self, call: AttentionCall, *, residuals: bool, empty_rows: bool = False) -> dict[str, Array]:
        """Run a call by the function that stands for the true one."""
        self.note()
        # NumPy's float64 becomes what JAX makes of it.
        floats = {name: getattr(call, name) for name in ("q", "k", "v", "sinks", "bias")}
        given: dict[str, Any] = {name: jax.numpy.asarray(x) for name, x in floats.items() if x is not None}
        call = dataclasses.replace(call, **given)
        if self.mode == "right":
            call = self._record(call, residuals, empty_rows)
        with _enter():
            try:
                return _run_compiled(call, self.implementation, residuals)
            except Exception as error:
                if self.implementation is self.right:
                    raise
                self.note(f"broken: {type(error).__name__}: {error}")  # it is no wrong result
                return _run_compiled(call, self.right, residuals)

    def attend_plainly(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        offset: int = 0,
        mask: Array | Mask | None = None,
        save_residuals: bool = False,
        **options: Any,
    ) -> Any:
        """Compute attention from the parameters of a plain function (docs/contract.md, section 4).

        Query `i` stands at key `i + offset`. `mask` may also be a mask of `cases.masks`.
        """
        masks: list[Mask] = [Causal(offset)] if causal else []
        if window is not None:
            masks.append(Window(*window, offset))
        if mask is not None:
            masks.append(mask if isinstance(mask, Mask) else build_indexer(mask))
        results = self.attend(AttentionCall(q, k, v, tuple(masks), **options), residuals=save_residuals)
        out = results.pop("out")
        return (out, results) if save_residuals else out

    def _record(self, call: AttentionCall, residuals: bool, empty_rows: bool) -> AttentionCall:
        """Write a call to a file when its values are known; return the call to go on with."""
        leaves, structure = jax.tree.flatten(_get_arrays(call))
        key = (structure, *map(_describe, leaves), *(repr(m) for m in call.masks if not isinstance(m, Dense)))
        key = (*key, call.soft_cap, call.scale, residuals)
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        if sum(x.size * x.dtype.itemsize for x in leaves) > _LARGEST:
            self.note("larger than 64 MiB: not compared")
            return call
        if call.q.dtype.name not in DTYPE_NAMES:
            self.note(f"{call.q.dtype} operands: not compared")
            return call
        differentiated: set[str] = set()

        def store(*values: Any) -> None:
            kept = (key, *sorted(differentiated))
            if self.counts.get(kept, 0) >= _KEPT:
                return
            self.counts[kept] = self.counts.get(kept, 0) + 1
            found = jax.tree.unflatten(structure, [np.asarray(x) for x in values])
            names = tuple(sorted(differentiated))
            recorded = RecordedCall(_with_arrays(call, found), residuals, names, empty_rows, test)
            number = sum(self.counts.values())
            with (self.folder / f"call-{os.getpid()}-{number:05d}.pickle").open("wb") as file:
                pickle.dump(recorded, file)

        def watch(name: str, x: Array) -> Array:
            if x is None or not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
                return x

            @jax.custom_jvp
            def keep(x: Array) -> Array:
                return x

            @keep.defjvp
            def keep_jvp(primals: Any, tangents: Any) -> Any:
                differentiated.add(name)
                return primals[0], tangents[0]

            return keep(x)

        watched = {name: watch(name, getattr(call, name)) for name in ("q", "k", "v", "sinks", "bias")}
        call = dataclasses.replace(call, **watched)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            jax.debug.callback(store, *leaves)
        else:
            store(*leaves)
        return call


def _run_compiled(call: AttentionCall, implementation: Implementation, residuals: bool) -> dict[str, Array]:
    """Run a call as one program, which takes less time than its operations one by one."""

    def run(arrays: dict[str, Any]) -> dict[str, Array]:
        return _with_arrays(call, arrays).run(implementation, residuals=residuals)

    return jax.jit(run)(_get_arrays(call))


def _get_arrays(call: AttentionCall) -> dict[str, Any]:
    """Return the arrays of a call; `pairs` are those of its masks."""
    arrays: dict[str, Any] = {name: getattr(call, name) for name in ("q", "k", "v", "segment_ids", "sinks", "bias")}
    return {**arrays, "pairs": [mask.array for mask in call.masks if isinstance(mask, Dense)]}


def _with_arrays(call: AttentionCall, arrays: Mapping[str, Any]) -> AttentionCall:
    """Return the call with other arrays."""
    pairs = iter(arrays["pairs"])
    masks = tuple(Indexer(next(pairs)) if isinstance(mask, Dense) else mask for mask in call.masks)
    return dataclasses.replace(call, **{n: x for n, x in arrays.items() if n != "pairs"}, masks=masks)


def read_recorded_calls(folder: Path) -> list[RecordedCall]:
    """Read the calls that the processes of a run recorded."""
    found = []
    for path in sorted(folder.glob("call-*.pickle")):
        with path.open("rb") as file:
            found.append(pickle.load(file))
    return found

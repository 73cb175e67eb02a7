"""An executor whose kernel is in a process of its own."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate

from cases.case import Case
from conformance import environment
from conformance.calling import mishaps
from conformance.calling.execution import Executor, P, Returned
from conformance.calling.registry import ImplementationNotFound
from conformance.contract import Implementation
from conformance.records import printable
from conformance.sandbox import declaration_codec
from conformance.sandbox.handshake import MAX_TEXT
from conformance.sandbox.kernel_process import KernelProcess, Limits, LoadFailed, ProcessLost
from conformance.sandbox.kernel_server import CallRequest
from conformance.sandbox.policy import SandboxPolicy

_GENERATIONS = itertools.count(1)


class SupportQueryFailed(ImplementationNotFound):
    """What says which cases a kernel supports raised, or took its process down."""


@dataclasses.dataclass(frozen=True, eq=False)
class KernelProxy:
    """Stands for the calls of a kernel that is in another process."""

    process: KernelProcess
    _support_by_case: dict[Case, str | None] = dataclasses.field(default_factory=dict)

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """Never to be called: nothing of the kernel is here."""
        raise RuntimeError(f"{self.process.name} is in a process of its own, and is asked through its executor")

    def supports(self, case: Case) -> str | None:
        """Why the kernel does not support a case, by its own function. It is not told which values the case has.

        It says so once: one that went by how often it was asked could have a level left out that is not declined.
        """
        unseeded = dataclasses.replace(case, seed=0)
        if unseeded in self._support_by_case:
            return self._support_by_case[unseeded]
        try:
            found = self.process.call(CallRequest((), "", 0, declaration_codec.evaluate_support, (unseeded,), {}))
        except (Exception, ProcessLost) as error:
            why = str(error) if isinstance(error, ProcessLost) else mishaps.told(error)
            raise SupportQueryFailed(f"{self.process.name} cannot say whether it supports {case.id}: {why}") from error
        self._support_by_case[unseeded] = None if found is None else printable(str(found)[:MAX_TEXT])
        return self._support_by_case[unseeded]


class SandboxedExecutor(Executor):
    """Has everything done in the kernel's process."""

    def __init__(
        self,
        implementation: Implementation,
        process: KernelProcess,
        options: Mapping[str, bool | int] | None = None,
        variant: str = "",
        generation: int = 0,
    ) -> None:
        """An executor of what `process` has, or of a variant of it; its programs get these compiler options."""
        super().__init__(implementation, options)
        self._process, self._variant, self._generation = process, variant, generation

    def run(
        self, function: Callable[Concatenate[Executor, P], Returned], *args: P.args, **kwargs: P.kwargs
    ) -> Returned:
        """What `function` returns there."""
        found: Returned = self._process.call(self._build_request(function, args, kwargs))
        return found

    def begin(self, function: Callable[Concatenate[Executor, P], Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have the kernel's process start on what will be `run`."""
        self._process.begin(self._build_request(function, args, kwargs))

    def settle(self) -> None:
        """Wait for what was begun and not asked for. Raises `ProcessLost` if the kernel's process died of it."""
        self._process.settle()

    def _build_request(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> CallRequest:
        options = tuple(sorted(self.options.items()))
        return CallRequest(options, self._variant, self._generation, function, args, kwargs)

    def with_default_flags(self) -> Executor | None:
        """Return an executor whose programs are compiled as JAX does by default, as its users' are; None if these are.

        On a CPU it asks another process. That differs from this one by what XLA read at its start, and by no option of
        a request. Processes cannot share an accelerator: there it asks this process, with compiler options.
        """
        options = environment.default_options()
        if not options:
            return None
        if self.backend != "cpu":
            return SandboxedExecutor(self.implementation, self._process, options, self._variant)
        return SandboxedExecutor(self.implementation, self._process.with_default_flags(), None, self._variant)

    def create_fresh(self) -> Executor:
        """Return an executor with the same options in a new process.

        Processes cannot share an accelerator: there it asks this process, which compiles for it once more.
        """
        if self.backend != "cpu":
            return SandboxedExecutor(
                self.implementation, self._process, self.options, self._variant, next(_GENERATIONS)
            )
        return SandboxedExecutor(self.implementation, self._process.create_fresh(), self.options, self._variant)

    def declaring(self, implementation: Implementation) -> Executor:
        """The executor for the same call with other declarations."""
        return SandboxedExecutor(implementation, self._process, self.options, self._variant)

    def variant(self, name: str) -> Executor:
        """The executor of one of the other calls that must give the same results."""
        other = dataclasses.replace(self.implementation, parts=None)
        return SandboxedExecutor(other, self._process, self.options, name)

    @property
    def backend(self) -> str:
        """The JAX backend that it runs on."""
        return self._process.handshake.backend

    @property
    def isolation(self) -> str:
        """How the kernel's process is kept from what is none of its business."""
        return self._process.handshake.confined

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return self._process.handshake.count

    @property
    def files(self) -> Mapping[str, str]:
        """The files that the kernel read as it was first loaded, with their digests."""
        return self._process.handshake.files

    def pop_later_files(self) -> dict[str, str]:
        """Return the files that it has first read since then, each of them once."""
        return self._process.files.pop_later()


def load_sandboxed(
    name: str,
    products: str | None,
    limits: Limits,
    problem: str | None = None,
    first_handshake: str = "",
    sandbox: SandboxPolicy | None = None,
) -> Implementation:
    """The implementation called `name`, in a process of its own: all that is here is what it declares.

    Args:
      name: as `--impl` has it.
      products: what `--products` says.
      limits: of one call.
      problem: the named problem whose operands it takes, if it is said.
      first: what it told another process of this run about itself (`collect_handshakes`), if there is one.
      sandbox: what the command says of the sandbox, if anything.

    Raises:
      ImplementationNotFound: with one line that says why.
    """
    proxy = KernelProxy(KernelProcess(name, products, limits, problem, first_handshake, sandbox=sandbox))
    try:
        # It goes by the name that it is found by, whatever it calls itself: that may be another's.
        return declaration_codec.parse_declarations(
            {**proxy.process.handshake.declared, "name": name}, proxy, proxy.supports
        )
    except LoadFailed as error:
        raise ImplementationNotFound(str(error)) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ImplementationNotFound(printable(f"{name} declares what no implementation can: {error}")) from error


def create_executor(implementation: Implementation) -> Executor:
    """The executor of an implementation, wherever it is."""
    call = implementation.call
    return (
        SandboxedExecutor(implementation, call.process) if isinstance(call, KernelProxy) else Executor(implementation)
    )


def collect_handshakes(implementations: Iterable[Implementation]) -> tuple[tuple[str, str], ...]:
    """What each kernel in a process of its own said of itself, by name: it must say so wherever it is judged."""
    calls = ((implementation.name, implementation.call) for implementation in implementations)
    return tuple((name, call.process.handshake.text) for name, call in calls if isinstance(call, KernelProxy))


def is_sandboxed(implementation: Implementation) -> bool:
    """Whether the kernel is in a process of its own."""
    return isinstance(implementation.call, KernelProxy)


def end_process(implementation: Implementation) -> None:
    """End the kernel's process, if it has one; it is started again if it is asked once more."""
    if isinstance(implementation.call, KernelProxy):
        implementation.call.process.end()

"""Execute a kernel in a process of its own, behind the interface of `Executor`.

`load_sandboxed` returns an implementation whose functions are a proxy (`KernelProxy`). `create_executor` returns the
executor for any implementation, wherever it runs. Checks use executors only, so they do not depend on where a kernel
runs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate

from cases.case import Case
from conformance import environment
from conformance.execution import kernel_errors
from conformance.execution.executor import Executor, P, Returned
from conformance.execution.implementation_registry import ImplementationNotFound
from conformance.sandbox import declaration_codec
from conformance.sandbox.handshake import MAX_TEXT
from conformance.sandbox.kernel_process import KernelProcess, Limits, LoadFailed, ProcessLost
from conformance.sandbox.kernel_server import CallRequest
from conformance.sandbox.policy import SandboxPolicy
from impls.contract.implementation import Implementation
from reports.printable_text import make_printable

_GENERATIONS = itertools.count(1)


class SupportQueryFailed(ImplementationNotFound):
    """Raised if the kernel's own `supports_case` function raises, or if the kernel's process dies in it."""


@dataclasses.dataclass(frozen=True, eq=False)
class KernelProxy:
    """A placeholder for the functions of a kernel that runs in another process.

    Attributes:
      process: the kernel's process.
      declared: for a plain function, declarations by name with which its calls are made in place of its own.
    """

    process: KernelProcess
    declared: tuple[tuple[str, Any], ...] = ()
    _support_by_case: dict[Case, str | None] = dataclasses.field(default_factory=dict)

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """Raise `RuntimeError`, since the kernel cannot be called in this process, only through its executor."""
        raise RuntimeError(f"{self.process.name} runs in a process of its own: call it through its executor")

    def supports(self, case: Case) -> str | None:
        """Return why the kernel's own `supports_case` function declines a case; None if the case is supported.

        The kernel does not learn the case's seed. The answer is cached for each case: a kernel whose answer depended on
        the number of calls could avoid cases without declaring them unsupported.

        Raises:
          SupportQueryFailed: if the kernel's function raised, or its process was lost.
        """
        unseeded = dataclasses.replace(case, seed=0)
        if unseeded in self._support_by_case:
            return self._support_by_case[unseeded]
        try:
            found = self.process.call(CallRequest((), "", 0, declaration_codec.evaluate_support, (unseeded,), {}))
        except (Exception, ProcessLost) as error:
            why = str(error) if isinstance(error, ProcessLost) else kernel_errors.describe_kernel_error(error)
            raise SupportQueryFailed(f"{self.process.name} cannot say whether it supports {case.id}: {why}") from error
        self._support_by_case[unseeded] = None if found is None else make_printable(str(found)[:MAX_TEXT])
        return self._support_by_case[unseeded]


class SandboxedExecutor(Executor):
    """An executor that runs all functions in the kernel's process."""

    def __init__(
        self,
        implementation: Implementation,
        process: KernelProcess,
        options: Mapping[str, bool | int] | None = None,
        variant: str = "",
        generation: int = 0,
        declared: tuple[tuple[str, Any], ...] = (),
    ) -> None:
        """Create an executor.

        Args:
          options: compiler options for its programs.
          variant: the name of a variant of the kernel; empty for the kernel itself.
          generation: a number that distinguishes executors with the same options. Each compiles its own programs.
          declared: declarations by name with which the process makes calls of a plain function.
        """
        super().__init__(implementation, options)
        self._process, self._variant, self._generation, self._declared = process, variant, generation, declared

    def run(
        self, function: Callable[Concatenate[Executor, P], Returned], *args: P.args, **kwargs: P.kwargs
    ) -> Returned:
        """Call `function` with an executor of the kernel in its process, and return the result."""
        found: Returned = self._process.call(self._build_request(function, args, kwargs))
        return found

    def begin(self, function: Callable[Concatenate[Executor, P], Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Start a call in the kernel's process. A later `run` with identical arguments returns its result."""
        self._process.begin(self._build_request(function, args, kwargs))

    def settle(self) -> None:
        """Wait for calls that `begin` started and no `run` used. Raises `ProcessLost` if the process died in one."""
        self._process.settle()

    def _build_request(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> CallRequest:
        options = tuple(sorted(self.options.items()))
        return CallRequest(options, self._variant, self._generation, function, args, kwargs, self._declared)

    def with_default_flags(self) -> Executor | None:
        """Return an executor that compiles under JAX's default flags; None if this one does so already.

        On a CPU the new executor uses another process, since XLA reads its flags when a process starts. Processes
        cannot share an accelerator. So there the new executor uses the same process, with compiler options.
        """
        options = environment.build_default_options()
        if not options:
            return None
        if self.backend != "cpu":
            return self._replace(self._process, options)
        return self._replace(self._process.with_default_flags(), None)

    def create_fresh(self, *, new_hashes: bool = False) -> Executor:
        """Return an executor with the same options in a new process, with `new_hashes` from another fork server.

        Processes cannot share an accelerator. There, the new executor compiles everything again in the same process.
        """
        if self.backend != "cpu":
            return self._replace(self._process, self.options, next(_GENERATIONS))
        return self._replace(self._process.create_fresh(new_hashes=new_hashes), self.options)

    def _replace(
        self, process: KernelProcess, options: Mapping[str, bool | int] | None, generation: int = 0
    ) -> SandboxedExecutor:
        return SandboxedExecutor(self.implementation, process, options, self._variant, generation, self._declared)

    def with_declarations(self, implementation: Implementation) -> Executor:
        """Return an executor for the same kernel with other declarations."""
        return SandboxedExecutor(implementation, self._process, self.options, self._variant, declared=self._declared)

    def variant(self, name: str) -> Executor:
        """Return an executor for a variant of the kernel: another call that must give the same results."""
        other = dataclasses.replace(self.implementation, parts=None)
        return SandboxedExecutor(other, self._process, self.options, name, declared=self._declared)

    @property
    def backend(self) -> str:
        """The JAX backend of the kernel's process."""
        return self._process.handshake.backend

    @property
    def isolation(self) -> str:
        """The sentence that says how the kernel's process is confined."""
        return self._process.handshake.confined

    @property
    def devices(self) -> int:
        """The number of JAX devices of the kernel's process."""
        return self._process.handshake.count

    @property
    def files(self) -> Mapping[str, str]:
        """The files that the kernel read until it was first loaded, with their digests."""
        return self._process.handshake.files

    def pop_later_files(self) -> dict[str, str]:
        """Return files that the kernel read for the first time since this method was last called, with digests."""
        return self._process.files.pop_later()


def load_sandboxed(
    name: str,
    products: str | None,
    limits: Limits,
    problem: str | None = None,
    first_handshake: str = "",
    sandbox: SandboxPolicy | None = None,
) -> Implementation:
    """Load a kernel in a process of its own, and return an implementation with its declarations and a proxy.

    `first_handshake` is the kernel's first one with another process of this run (`collect_handshakes`), or empty.
    Raises `ImplementationNotFound`, with a message of one line, if the kernel cannot be loaded.
    """
    proxy = KernelProxy(KernelProcess(name, products, limits, problem, first_handshake, sandbox=sandbox))
    try:
        # The implementation gets the name by which it was found: the name that it declares may be another kernel's.
        return declaration_codec.parse_declarations(
            {**proxy.process.handshake.declared, "name": name}, proxy, proxy.supports
        )
    except LoadFailed as error:
        raise ImplementationNotFound(str(error)) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ImplementationNotFound(make_printable(f"{name} declares what no implementation can: {error}")) from error


def create_executor(implementation: Implementation, options: Mapping[str, bool | int] | None = None) -> Executor:
    """Return an executor in the kernel's process, if it has one; `options` are compiler options for this process."""
    call = implementation.call
    if isinstance(call, KernelProxy):
        return SandboxedExecutor(implementation, call.process, declared=call.declared)
    return Executor(implementation, options)


def collect_handshakes(implementations: Iterable[Implementation]) -> tuple[tuple[str, str], ...]:
    """Return the name and the handshake of each sandboxed kernel, which all its other processes must repeat."""
    calls = ((implementation.name, implementation.call) for implementation in implementations)
    return tuple((name, call.process.handshake.text) for name, call in calls if isinstance(call, KernelProxy))


def is_sandboxed(implementation: Implementation) -> bool:
    """Tell whether a kernel runs in a process of its own."""
    return isinstance(implementation.call, KernelProxy)


def end_process(implementation: Implementation) -> None:
    """End the kernel's process, if it has one. The next call starts it again."""
    if isinstance(implementation.call, KernelProxy):
        implementation.call.process.end()

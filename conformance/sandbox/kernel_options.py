"""Find kernels under the options of a command, and decide where they run.

Implementations of this project run in the judge's process, all others in a sandbox unless `--in-process` is given.
"""

from __future__ import annotations

import dataclasses

from conformance.execution import implementation_registry
from conformance.sandbox import confinement, sandboxed_executor
from conformance.sandbox.kernel_process import Limits
from conformance.sandbox.policy import SandboxPolicy
from impls.contract.declarations import Products
from impls.contract.implementation import Implementation


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """The options of a command that concern the kernels that it judges."""

    # The precision in which plain functions multiply f32 operands (`--products`); None if not given.
    products: Products | None = None
    in_process: bool = False
    timeout: float | None = None  # the most seconds that one call may take; None if not given
    memory: float | None = None  # the most memory that a kernel's process may take, in GiB; None if not given
    problem: str | None = None  # the named problem whose operands the kernels take (`--problem`); None if not given
    sandbox: SandboxPolicy = dataclasses.field(default_factory=SandboxPolicy)
    # Whether a kernel is refused if it cannot be confined completely (`--require-sandbox`).
    require_sandbox: bool = False
    # The first handshakes of kernels, by name, from the process that started this one.
    handshakes: tuple[tuple[str, str], ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """Return the command-line options that give these values."""
        numbers = (("timeout", self.timeout), ("memory", self.memory))
        return (
            *((f"--problem={self.problem}",) if self.problem else ()),
            *((f"--products={self.products}",) if self.products else ()),
            *(("--in-process",) if self.in_process else ()),
            *(f"--{name}={value:g}" for name, value in numbers if value is not None),
            *self.sandbox.options,
            *(("--require-sandbox",) if self.require_sandbox else ()),
        )

    def find(self, name: str) -> Implementation:
        """Load an implementation by its name, and start its process unless it runs in the judge's.

        Raises:
          implementation_registry.ImplementationNotFound: if it cannot be loaded; the message is one line.
        """
        if implementation_registry.is_builtin(name) or not implementation_registry.may_exist(name):
            return implementation_registry.find_implementation(name, products=self.products, problem=self.problem)
        if self.in_process:
            if self.require_sandbox:
                raise implementation_registry.ImplementationNotFound(
                    "--in-process has no sandbox, and --require-sandbox asks for one"
                )
            return implementation_registry.find_implementation(name, products=self.products, problem=self.problem)
        limits = Limits.from_options(self.timeout, self.memory)
        first_handshake = dict(self.handshakes).get(name, "")
        found = sandboxed_executor.load_sandboxed(
            name, self.products, limits, self.problem, first_handshake, self.sandbox
        )
        sentence = sandboxed_executor.create_executor(found).isolation
        if self.require_sandbox and not confinement.is_confined(sentence):
            sandboxed_executor.end_process(found)
            raise implementation_registry.ImplementationNotFound(
                f"{name} is {sentence}; --require-sandbox refuses such a kernel"
            )
        return found

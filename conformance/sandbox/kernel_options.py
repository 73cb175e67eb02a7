"""Find kernels under the options of a command: ours in the judge's process, all others in a sandbox."""

from __future__ import annotations

import dataclasses

from conformance.contract import Implementation, Products
from conformance.execution import implementation_registry
from conformance.sandbox import confinement, sandboxed_executor
from conformance.sandbox.kernel_process import Limits
from conformance.sandbox.policy import SandboxPolicy


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """The options of a command that concern the kernels that it judges.

    Attributes:
      products: how plain functions multiply f32 operands (`--products`), if it is given.
      in_process: whether all kernels run in the judge's process, for debugging (`--in-process`).
      seconds: how long one call may take (`--timeout`), if it is given.
      gib: how much memory a kernel's process may take (`--memory`), if it is given.
      problem: the named problem whose operands the kernels take (`--problem`), if it is given.
      sandbox: what kernels may read beyond what each needs.
      require_sandbox: whether a kernel is refused if it cannot be confined completely (`--require-sandbox`).
      handshakes: the first handshakes of kernels, by name, from the process that started this one.
    """

    products: Products | None = None
    in_process: bool = False
    seconds: float | None = None
    gib: float | None = None
    problem: str | None = None
    sandbox: SandboxPolicy = dataclasses.field(default_factory=SandboxPolicy)
    require_sandbox: bool = False
    handshakes: tuple[tuple[str, str], ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """Return the command-line options that give these values."""
        numbers = (("timeout", self.seconds), ("memory", self.gib))
        return (
            *((f"--problem={self.problem}",) if self.problem else ()),
            *((f"--products={self.products}",) if self.products else ()),
            *(("--in-process",) if self.in_process else ()),
            *(f"--{name}={value:g}" for name, value in numbers if value is not None),
            *self.sandbox.options,
            *(("--require-sandbox",) if self.require_sandbox else ()),
        )

    def find(self, name: str) -> Implementation:
        """Load an implementation by its name, and start its process if it gets one.

        Raises:
          registry.ImplementationNotFound: with one line that says why.
        """
        if implementation_registry.is_builtin(name) or not implementation_registry.may_exist(name):
            return implementation_registry.find_implementation(name, products=self.products, problem=self.problem)
        if self.in_process:
            if self.require_sandbox:
                raise implementation_registry.ImplementationNotFound(
                    "--in-process has no sandbox, and --require-sandbox asks for one"
                )
            return implementation_registry.find_implementation(name, products=self.products, problem=self.problem)
        limits = Limits.from_options(self.seconds, self.gib)
        first_handshake = dict(self.handshakes).get(name, "")
        found = sandboxed_executor.load_sandboxed(
            name, self.products, limits, self.problem, first_handshake, self.sandbox
        )
        sentence = sandboxed_executor.create_executor(found).isolation
        if self.require_sandbox and not confinement.is_confined(sentence):
            sandboxed_executor.end_process(found)
            raise implementation_registry.ImplementationNotFound(
                f"{name} is {sentence}; --require-sandbox judges no such kernel"
            )
        return found

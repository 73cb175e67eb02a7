"""Test the handshake: a kernel sends the same from each process, and only what a kernel can declare."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cases.case import Case
from conformance.execution import implementation_registry
from conformance.execution.plain_functions import build_implementation
from conformance.sandbox import declaration_codec, kernel_process, sandboxed_executor
from conformance.sandbox.kernel_options import KernelOptions
from conformance.sandbox.kernel_process import Limits
from impls import block_flash, context_parallel
from tests.kernels import naive

CASE = Case(q_length=16, kv_length=16, head_dim=16, v_head_dim=16)
HERE = Path(__file__).parent
LIMITS = Limits(timeout=60.0, memory=4 * 2**30)


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """End all processes after the test."""
    yield
    kernel_process.end_all_processes()


@pytest.mark.parametrize(
    "said",
    [
        None,
        [1],
        {"declared": {}, "backend": "cpu"},
        {"declared": {}, "backend": "cpu", "count": "one"},
        {"declared": {}, "backend": "cpu", "count": 4},
    ],
    ids=str,
)
def test_what_is_no_declaration_is_one_line(said: object, tmp_path: Path) -> None:
    kernel = f"from tests.sandbox.misbehaving_kernels import forges\nattention = forges({said!r})\n"
    (tmp_path / "forged.py").write_text(kernel)
    with pytest.raises(
        implementation_registry.ImplementationNotFound, match=r"what is no answer|what no implementation can"
    ):
        KernelOptions().find(f"{tmp_path}/forged.py:attention")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("description", 3),
        ("validates", 1),
        ("writes_pages", "no"),
        ("devices", True),
        ("devices", "2"),
        ("empty_rows", "nan"),
        ("unsupported", ["causal"]),
        ("unsupported", {"causal": 3}),
        ("arithmetic", {"products": 3}),
    ],
    ids=str,
)
def test_a_declaration_of_a_wrong_type_is_refused(field: str, value: object) -> None:
    told = declaration_codec.serialize_declarations(build_implementation(naive.attention, "right"))
    assert declaration_codec.parse_declarations(told, print, lambda _: None).name == "right"
    with pytest.raises((TypeError, ValueError), match=field if field != "arithmetic" else "products"):
        declaration_codec.parse_declarations({**told, field: value}, print, lambda _: None)


def test_a_kernel_goes_by_the_name_that_it_is_found_by(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(
        "from conformance.sandbox import declaration_codec\n"
        "from conformance.execution.plain_functions import build_implementation\n"
        "from tests.sandbox.misbehaving_kernels import forges, right\n"
        "told = declaration_codec.serialize_declarations(build_implementation(right, 'dot_product'))\n"
        "attention = forges({'declared': told, 'backend': 'cpu', 'count': 4})\n"
    )
    found = KernelOptions().find(f"{tmp_path}/named.py:attention")
    assert found.name == f"{tmp_path}/named.py:attention"


def test_a_kernel_says_of_itself_what_it_said_first() -> None:
    said = sandboxed_executor.collect_handshakes([KernelOptions().find(f"{HERE}/declared_kernel.py:IMPLEMENTATION")])
    name, text = said[0]
    with pytest.raises(
        implementation_registry.ImplementationNotFound,
        match=r"other values than when it was first loaded: .*arithmetic",
    ):
        sandboxed_executor.load_sandboxed(
            name, None, LIMITS, first_handshake=text.replace('"products": "exact"', '"products": "bf16"')
        )


def test_a_kernel_that_says_it_has_fewer_devices_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "hides.py").write_text(
        "from tests.sandbox.misbehaving_kernels import forges\n"
        "attention = forges({'declared': {}, 'backend': 'cpu', 'count': 1})\n"
    )
    with pytest.raises(implementation_registry.ImplementationNotFound, match="its process has 1 of 4 devices"):
        KernelOptions().find(f"{tmp_path}/hides.py:attention")


def test_a_kernel_cannot_change_how_many_devices_it_has(tmp_path: Path) -> None:
    flag = "--xla_force_host_platform_device_count=1"
    (tmp_path / "hides.py").write_text(
        f"import os\nos.environ['XLA_FLAGS'] = '{flag}'\n"
        "from tests.sandbox.misbehaving_kernels import right as attention\n"
    )
    found = KernelOptions().find(f"{tmp_path}/hides.py:attention")
    assert sandboxed_executor.create_executor(found).devices == 4


def test_a_kernel_that_computes_elsewhere_than_the_judge_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.py").write_text(
        "from tests.sandbox.misbehaving_kernels import forges\n"
        "attention = forges({'declared': {}, 'backend': 'gpu', 'count': 4})\n"
    )
    with pytest.raises(
        implementation_registry.ImplementationNotFound, match="its process computes on gpu, and the judge on cpu"
    ):
        KernelOptions().find(f"{tmp_path}/elsewhere.py:attention")


def test_functions_of_a_kernel_in_another_process_are_declared_as_there() -> None:
    own = dataclasses.replace(
        context_parallel.IMPLEMENTATIONS[0], parts=block_flash.attention, tunable=None, supports_case=None
    )
    declared = declaration_codec.serialize_declarations(own)
    proxy: Any = sandboxed_executor.KernelProxy(None)  # type: ignore[arg-type] # makes no call
    parsed = declaration_codec.parse_declarations(declared, proxy, proxy.supports)
    assert declaration_codec.serialize_declarations(parsed) == declared

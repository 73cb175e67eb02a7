"""Memory of compiled programs, read from their texts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from conformance.accelerators import compilation
from conformance.accelerators.targets import TPU, list_targets
from conformance.cost.program_memory import measure_live_bytes, measure_vmem_bytes

needs_compiler = pytest.mark.skipif(TPU.missing is not None, reason=str(TPU.missing))


def test_vmem_is_that_of_the_largest_kernel_and_of_kernels_only() -> None:
    line = '%{} custom_call_target="{}" "used_scoped_memory_configs":[{{"memory_space":"1","offset":"0","size":"{}"}}]'
    kernels = [line.format("a", "tpu_custom_call", 7), line.format("b", "tpu_custom_call", 9).replace(" ", "\n")]
    assert measure_vmem_bytes("\n".join([*kernels, line.format("c", "fusion", 99)])) == 9
    assert measure_vmem_bytes("ROOT %add") is None


PROGRAM = """HloModule jit_f, is_scheduled=true, entry_computation_layout={()->f32[8,128]{1,0}}

%fused (p: f32[8,128]) -> f32[8,128] {
  ROOT %inside = f32[1024,128]{1,0:T(8,128)} negate(%p)
}

ENTRY %main (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  %a = bf16[3,4,64]{2,1,0:T(8,128)(2,1)S(1)} fusion(%p), kind=kLoop, calls=%fused
  %name = bf16[12,64]{1,0:T(8,128)(2,1)} bitcast(%a)
  %pair = (f32[8,128]{1,0}, /*index=1*/f32[16,128]{1,0:T(8,128)}) custom-call(%name, %p), attributes={metadata={
"block_q": 128
}}, metadata={op_name="k"}
  %one = f32[8,128]{1,0:T(8,128)} get-tuple-element(%pair), index=0
  %two = f32[16,128]{1,0:T(8,128)} get-tuple-element(%pair), index=1
  %added = f32[16,128]{1,0:T(8,128)} custom-call(%one, %two), output_to_operand_aliasing={{}: (1, {})}
  %start = (f32[16,128]{1,0:T(8,128)S(1)}, f32[16,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%added)
  %done = f32[16,128]{1,0:T(8,128)S(1)} copy-done(%start)
  ROOT %out = f32[8,128]{1,0:T(8,128)} fusion(%done), kind=kLoop, calls=%fused
}
"""


def test_what_is_live_at_once_is_counted_wherever_it_is_kept() -> None:
    padded = 3 * 8 * 128 * 2  # `a`, its tiles filled up
    pair = (8 + 16) * 128 * 4
    assert measure_live_bytes(PROGRAM) == padded + pair
    # `two` is added to in place and copied to the other memory: the same value.
    assert measure_live_bytes(PROGRAM.replace("custom-call(%name, %p)", "custom-call(%p)")) == pair
    assert measure_live_bytes(PROGRAM.replace("is_scheduled=true, ", "")) is None


def test_what_is_copied_in_slices_counts_once() -> None:
    """Put together in the other memory they are the value that they come from: an operand is no temporary."""
    slices = "".join(
        f"  %start.{i} = ((s8[8192]{{0:T(1024)}}), s8[4096]{{0:T(1024)S(1)}}, u32[]{{:S(2)}}) slice-start(%{{0}}), "
        f"slice={{[{4096 * i}:{4096 * (i + 1)}]}}\n"
        f"  %done.{i} = s8[4096]{{0:T(1024)S(1)}} slice-done(%start.{i})\n"
        for i in range(2)
    )
    program = (
        "HloModule jit_f, is_scheduled=true\n\nENTRY %main {\n"
        "  %p = s8[8192]{0:T(1024)} parameter(0)\n"
        "  %made = s8[8192]{0:T(1024)} fusion(%p), kind=kLoop\n" + slices + "  %whole = f32[16,128]{1,0:T(8,128)S(1)} "
        'custom-call(%done.0, %done.1), custom_call_target="ConcatBitcast"\n'
        "  ROOT %out = f32[8,128]{1,0:T(8,128)} fusion(%whole), kind=kLoop\n}\n"
    )
    assert measure_live_bytes(program.replace("{0}", "made")) == 8192
    assert measure_live_bytes(program.replace("{0}", "p").replace("made = s8[8192]", "made = s8[1024]")) == 1024


@needs_compiler
def test_temporaries_that_the_compiler_finds_room_for_are_seen() -> None:
    def twice(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x) @ x

    operand = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    found = [compilation.compile_for(target, jax.jit(twice), (operand,)) for target in list_targets("tpu")]
    # What is between the products is kept in bf16, to which the second rounds it: by some in HBM, by some where the
    # result will be written, and by some in VMEM alone.
    assert any(figures["live_bytes"] >= 2**21 > figures["temporary_bytes"] for figures in found)

"""Data sheets of the TPUs that kernels are compiled for on a machine without a TPU.

The estimates of a kernel's cycles use the clock, the bandwidth and the number of cores.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tpu:
    """The sizes and speeds of a TPU generation, for one JAX device of that generation.

    Peaks and bandwidths are from Google's page on each generation (docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e and
    tpu7x, as of November 2026).

    The clock is computed: the peak divided by the operations that the matrix units of all cores do in a cycle. The
    operations in a cycle follow from the compiler's schedules. Up to v5p, two products of 512 by 512 by 128 keep all
    matrix units of a core busy for 1,024 cycles. From v6e on, the same products take 512 cycles, although a depth of
    128 fills only half of a unit. The resulting clocks are 1.05 GHz for v4 (as in Jouppi et al. 2023,
    arXiv:2304.01433), 1.5 GHz for v5e, 1.75 GHz for v5p and v6e, and 2.2 GHz for 7x.
    """

    name: str
    topology: str  # the smallest topology of this generation that libtpu describes
    kind: str
    cores: int  # number of cores of a JAX device; the cores share one kernel call
    tflops: float  # peak of a chip in bf16, in TFLOP/s
    chip_cores: int
    operations: int  # operations that one core's matrix units do in a cycle, in bf16
    hbm_gbps: float  # bandwidth between HBM and one device, in 10^9 bytes per second
    # Number of delay slots, which are bundles after a branch that run whether or not the branch is taken. The
    # compiler's schedules show the number.
    delay: int

    @property
    def clock_ghz(self) -> float:
        """Clock of a core in GHz."""
        return self.tflops * 1e3 / (self.chip_cores * self.operations)

    @property
    def bytes_a_cycle(self) -> float:
        """Largest number of bytes that HBM and a device can exchange in one cycle."""
        return self.hbm_gbps / self.clock_ghz


# bf16 operations of a core in a cycle: 2 (multiply and add) times 4 matrix units times the size of a unit.
_SMALL = 2 * 4 * 128**2
_LARGE = 2 * 4 * 256**2
TPUS: tuple[Tpu, ...] = (
    Tpu(
        name="v4",
        topology="v4:2x2x1",
        kind="TPU v4",
        cores=1,
        tflops=275,
        chip_cores=2,
        operations=_SMALL,
        hbm_gbps=1_200,
        delay=1,
    ),
    Tpu(
        name="v5e",
        topology="v5e:2x2",
        kind="TPU v5 lite",
        cores=1,
        tflops=197,
        chip_cores=1,
        operations=_SMALL,
        hbm_gbps=819,
        delay=4,
    ),
    Tpu(
        name="v5p",
        topology="v5p:2x2x1",
        kind="TPU v5",
        cores=2,
        tflops=459,
        chip_cores=2,
        operations=_SMALL,
        hbm_gbps=2_765,
        delay=4,
    ),
    Tpu(
        name="v6e",
        topology="v6e:2x2",
        kind="TPU v6 lite",
        cores=1,
        tflops=918,
        chip_cores=1,
        operations=_LARGE,
        hbm_gbps=1_638,
        delay=4,
    ),
    Tpu(
        name="7x",
        topology="tpu7x:2x2x1",
        kind="TPU7x",
        cores=1,
        tflops=2_307,
        chip_cores=2,
        operations=_LARGE,
        hbm_gbps=7_380 / 2,
        delay=6,
    ),
)

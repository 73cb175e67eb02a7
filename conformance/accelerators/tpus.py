"""Data sheets of the TPUs to compile for on a machine without one."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tpu:
    """A TPU generation, described by one JAX device of it.

    Peaks and bandwidths are from Google's page on each generation (docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e and
    tpu7x, as of November 2026). The clock is the peak divided by the operations that a core's matrix units do in a
    cycle. The compiler's schedules show these operations: two products of 512 by 512 by 128 take all units 1,024 cycles
    up to v5p. From v6e on they take 512, with a depth of 128 that fills half of a unit. The resulting clocks are 1.05
    GHz for v4 (as in Jouppi et al. 2023, arXiv:2304.01433), 1.5 for v5e, 1.75 for v5p and v6e, and 2.2 for 7x.

    Attributes:
      name: its name in records.
      topology: the smallest topology that libtpu describes.
      kind: its `jax.Device.device_kind`.
      cores: cores of a device, which share a call.
      tflops: peak of a chip in bf16, in TFLOP/s.
      chip_cores: tensor cores of a chip.
      operations: operations that a core's matrix units do in a cycle, in bf16.
      hbm_gbps: bandwidth between HBM and one device, in 10^9 bytes per second.
      delay: delay slots: bundles after a branch that run whether or not it is taken, as its schedules show.
    """

    name: str
    topology: str
    kind: str
    cores: int
    tflops: float
    chip_cores: int
    operations: int
    hbm_gbps: float
    delay: int

    @property
    def clock_ghz(self) -> float:
        """Clock in GHz."""
        return self.tflops * 1e3 / (self.chip_cores * self.operations)

    @property
    def bytes_a_cycle(self) -> float:
        """Largest number of bytes between HBM and a device in a cycle."""
        return self.hbm_gbps / self.clock_ghz


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

"""TPUs to compile for on a machine without one, and what bounds a kernel there."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tpu:
    """A generation, by one device as its compiler describes it.

    Peaks and bandwidths are of Google's pages on each generation (docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e and
    tpu7x, as of November 2026). The clock is the peak over what the matrix units of a core do in a cycle. The
    compiler's schedules show that: two products of 512 by 512 by 128 take all units 1,024 cycles up to v5p, and 512
    from v6e on, where a depth of 128 fills half of a unit. It gives 1.05 GHz for v4, as Jouppi et al. 2023,
    arXiv:2304.01433, say too; 1.5 for v5e, 1.75 for v5p and v6e, 2.2 for 7x.

    Attributes:
      name: how records name it.
      topology: the smallest that the library describes.
      kind: `jax.Device.device_kind`.
      cores: of a device, that share a call.
      tflops: of a chip, in bf16.
      chip_cores: tensor cores of a chip.
      operations: of the matrix units of a core in a cycle, in bf16.
      hbm_gbps: 10^9 bytes a second between HBM and one device.
      delay: bundles after a branch that run whichever way it goes, as its schedules show.
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
        """10^9 cycles a second."""
        return self.tflops * 1e3 / (self.chip_cores * self.operations)

    @property
    def bytes_a_cycle(self) -> float:
        """Between HBM and a device, at most."""
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

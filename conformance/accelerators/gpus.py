"""Data sheets of the GPUs that kernels are compiled for on a machine without a GPU.

XLA's compiler needs the sizes and speeds of a GPU (`Gpu.config`). The bounds on a kernel's cycles use its throughputs.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """The sizes and speeds of one GPU.

    Threads, registers and shared memory are from the CUDA C++ programming guide, "Compute capabilities". Cores and
    memory are from NVIDIA's data sheets. The compiler rejects kernels that need more shared memory than the GPU has.
    The speeds only influence XLA's own optimizations.
    """

    name: str
    kind: str  # the GPU's `jax.Device.device_kind`, from which kernels choose their block sizes
    major: int  # major compute capability; the minor compute capability is 0 for all GPUs here
    architecture: str  # name of the architecture for `ptxas`, such as `sm_90a`
    core_count: int
    fpus_per_core: int  # f32 units of a multiprocessor
    shared_memory_per_core: int  # shared memory of a multiprocessor, in bytes
    shared_memory_per_block: int  # largest shared memory of a block, in bytes
    l2_cache: int
    memory: int
    bandwidth: int
    clock_ghz: float
    # Products of 16-bit numbers that a multiprocessor's tensor cores compute in a cycle. A100: 1024, from the white
    # paper of its architecture. Hopper: twice as many, from its white paper. B200: the dense peak of its data sheet,
    # 2,250 TFLOP/s, over multiprocessors and clock, rounded to the next power of two.
    products_per_core: int

    @property
    def config(self) -> str:
        """This GPU as XLA's `GpuTargetConfigProto` in text format."""
        # From compute capability 9 on, matrix instructions exist only in the architecture-specific set ("sm_90a").
        extension = "ACCELERATED_FEATURES" if self.architecture.endswith("a") else "NONE"
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory_per_core}
  shared_memory_per_block_optin: {self.shared_memory_per_block}
  core_count: {self.core_count}
  fpus_per_core: {self.fpus_per_core}
  l2_cache_size: {self.l2_cache}
  memory_bandwidth: {self.bandwidth}
  device_memory_size: {self.memory}
  clock_rate_ghz: {self.clock_ghz}
  cuda_compute_capability {{ major: {self.major} minor: 0 feature_extension: {extension} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.kind}"
"""


_KIB = 1024
GPUS: tuple[Gpu, ...] = (
    Gpu(
        name="a100",
        kind="NVIDIA A100-SXM4-80GB",
        major=8,
        architecture="sm_80",
        core_count=108,
        fpus_per_core=64,
        shared_memory_per_core=164 * _KIB,
        shared_memory_per_block=163 * _KIB,
        l2_cache=40 * _KIB**2,
        memory=80 * 10**9,
        bandwidth=2_039 * 10**9,
        clock_ghz=1.41,
        products_per_core=1024,
    ),
    Gpu(
        name="h100",
        kind="NVIDIA H100 80GB HBM3",
        major=9,
        architecture="sm_90a",
        core_count=132,
        fpus_per_core=128,
        shared_memory_per_core=228 * _KIB,
        shared_memory_per_block=227 * _KIB,
        l2_cache=50 * _KIB**2,
        memory=80 * 10**9,
        bandwidth=3_350 * 10**9,
        clock_ghz=1.98,
        products_per_core=2048,
    ),
    Gpu(
        name="b200",
        kind="NVIDIA B200",
        major=10,
        architecture="sm_100a",
        core_count=148,
        fpus_per_core=128,
        shared_memory_per_core=228 * _KIB,
        shared_memory_per_block=227 * _KIB,
        l2_cache=126 * _KIB**2,
        memory=180 * 10**9,
        bandwidth=7_700 * 10**9,
        clock_ghz=1.965,
        products_per_core=4096,
    ),
)

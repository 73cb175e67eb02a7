"""Choose the folder of JAX's cache of compiled programs, or compile without the cache.

JAX names a cached program by a hash of everything that affects it: its text, the compiler's options and version, and
the devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def use_cache_folder(folder: Path) -> None:
    """Make JAX cache all compiled programs in a folder, also small ones and those that compile quickly."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # XLA's own caches would use a path below this folder. The path would be a compiler option of every program, and the
    # names of cached programs would depend on the folder.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    compilation_cache.reset_cache()  # JAX may have compiled before, with other settings


@contextlib.contextmanager
def bypass_cache() -> Iterator[None]:
    """Compile every program in the block anew, for example to measure the time of compiling."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()

"""Choose the folder of JAX's cache of compiled programs, or compile without it.

JAX names a cached program by all that it is compiled from: its text, options, the compiler's version, the devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def use_cache_folder(folder: Path) -> None:
    """Cache compiled programs in a folder, however small and quickly compiled they are."""
    jax.config.update("jax_compilation_cache_dir", str(folder))  # type: ignore[no-untyped-call] # untyped upstream
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # type: ignore[no-untyped-call] # untyped upstream
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)  # type: ignore[no-untyped-call] # untyped upstream
    # XLA's own caches would lie in this folder too. Then the folder would be an option of every program and change its
    # name.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # type: ignore[no-untyped-call] # untyped upstream
    compilation_cache.reset_cache()  # JAX reads the settings when it first compiles, which may be before this


@contextlib.contextmanager
def bypass_cache() -> Iterator[None]:
    """Compile every program in the block anew, for example to measure what compiling takes."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)  # type: ignore[no-untyped-call] # untyped upstream
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)  # type: ignore[no-untyped-call] # untyped upstream
        compilation_cache.reset_cache()

"""JAX's cache of compiled programs: in which folder it is, and compiling without it.

JAX names a program after what it is compiled from: its text, its options, the compiler's version, the devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def use_cache_folder(folder: Path) -> None:
    """Look for programs in a folder before they are compiled, and leave there what is compiled, however small."""
    jax.config.update("jax_compilation_cache_dir", str(folder))  # type: ignore[no-untyped-call] # untyped upstream
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # type: ignore[no-untyped-call] # untyped upstream
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)  # type: ignore[no-untyped-call] # untyped upstream
    # Caches of XLA's own would lie in this folder, and its name would be among the options that programs are named by.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # type: ignore[no-untyped-call] # untyped upstream
    compilation_cache.reset_cache()  # JAX decides when it first compiles, which may have been before


@contextlib.contextmanager
def bypass_cache() -> Iterator[None]:
    """Within it all is compiled: for who asks what compiling costs, or what the compiler says of a program."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)  # type: ignore[no-untyped-call] # untyped upstream
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)  # type: ignore[no-untyped-call] # untyped upstream
        compilation_cache.reset_cache()

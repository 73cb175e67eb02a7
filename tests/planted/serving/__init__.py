"""Bugs of attention as it is served: packed sequences, caches in pages, latents."""

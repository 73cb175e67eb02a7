"""Attention to start from: the reference in JAX, with both of its backwards, and the front end of a model."""

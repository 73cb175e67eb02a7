"""Slow, readable reference code in JAX for users: attention with two backward passes, and the front end of a model."""

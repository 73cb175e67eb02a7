"""Processes that begin with JAX loaded: they are forked from one that has loaded it, once, and computes nothing."""

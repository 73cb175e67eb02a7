"""The attention problems that exist: masks, cases and their ids, inputs, the axes and the covering grid.

This package knows nothing of implementations or tolerances, and imports no JAX.
"""

"""Judge attention functions of published libraries, each library in a Python environment of its own.

This package is optional: the core does not import it.
"""

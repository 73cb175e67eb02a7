"""The attention problems that exist: masks, cases and their ids, operands, the grids of cases.

This package needs NumPy only, and draws the same bits on every machine.
"""

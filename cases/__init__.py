"""Define the attention problems to judge: cases and their ids, masks, operands, and the sets of cases for each level.

This package needs NumPy only, and draws the same bits on every machine.
"""

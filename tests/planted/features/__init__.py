"""Bugs in what attention offers: masks, operands, heads, caches, front ends."""

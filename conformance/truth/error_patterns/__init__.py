"""Describe a wrong result in words: where in the tensor it is wrong, and what it holds there instead.

Fixed lists of locations and of kinds of values are fitted to the result (docs/reference/error-patterns.md). A
description is given only if it fits well. The same arrays always get the same words. Results within their limits are
not described. `pattern.find_pattern` is the entry point.
"""

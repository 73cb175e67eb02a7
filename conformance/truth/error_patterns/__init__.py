"""Patterns of an error: where in the tensor a wrong result is wrong, and what it holds there instead.

Fixed lists of places and of forms are fitted to what came (docs/verdicts.md, "Where in the tensor"). What does not fit
well is not said. NumPy only, the same words for the same arrays, and computed for failures alone.
"""

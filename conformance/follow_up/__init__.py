"""Judge further cases (probes) at the end of a run with failures.

Probes confirm what findings depend on, compare failing kernels with planted bugs, and shrink failing cases.
"""

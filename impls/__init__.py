"""Attention implementations: this project's own, and adapters around published ones (`impls.upstream`).

They import `cases` and `conformance.contract`, and never the oracle or the checks.
"""

"""Turn the records of a run into reports: an HTML page, a Markdown summary, terminal text and CI annotations.

Records, measurements and run records go in. This package never sees a kernel, the oracle or JAX.
"""

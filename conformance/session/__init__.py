"""Run the judge from its options to its exit code, without a command line and without pytest.

The `run` command, the pytest gate and Python callers all go through the functions of `session`. Each of them builds a
`RunSpec`, shows the progress in its own way, and prints the result.
"""

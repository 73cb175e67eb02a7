"""Run the judge from its options to its exit code, without a command line and without pytest.

The `run` command, the pytest gate and Python callers all use one class, `Session`. Each of them builds `RunSpec`,
shows the session's progress in its own way, and prints the result.
"""

"""Run a judgement from its options to its exit code, without a command line and without pytest.

The `run` command, the pytest gate and Python callers are faces of one `Session`. Each builds `RunOptions`, watches the
session's progress in its own way, and prints its result.
"""

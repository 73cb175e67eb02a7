"""Settings of this repository's own test run, made before anything imports JAX."""

from typing import Any

import pytest
from hypothesis import settings

from conformance import environment

environment.prepare_environment()

# The same examples in every run, so that a red test is red again; `--hypothesis-profile=default` draws new ones.
settings.register_profile("gate", derandomize=True, deadline=None)
settings.load_profile("gate")


def pytest_collection_finish() -> None:
    """Nothing that was imported to collect tests is garbage."""
    environment.collect_garbage_rarely()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers get tests that stand together, for they share compiled programs, and take from others in the end."""
    if config.getoption("dist") != "load":
        return None  # another was asked for
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)

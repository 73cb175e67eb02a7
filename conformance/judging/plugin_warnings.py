"""Keep warnings of other pytest plugins from ending the gate in projects that turn warnings into errors.

A plugin that warns in one of its hooks, as pytest-benchmark does with pytest-xdist, would end pytest with an internal
error. Such warnings are shown instead. For warnings of kernels and of tests, the project's filters stay in force.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Generator

import pytest

from conformance.judging import exit_guard

_OWN_PACKAGES = frozenset({"_pytest", "pytest", "conformance"})


class PluginWarnings:
    """A pytest plugin that shows warnings of other plugins, in all hooks except those that run tests.

    The hooks here run innermost (`trylast`): pytest's own wrappers around them apply the filters of the project.
    """

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Show plugins' warnings while plugins are configured, if this run of pytest judges kernels."""
        option = config.getoption
        if exit_guard.is_requested(config.args, option("--impl"), option("--conformance-cases")):
            plugins = [plugin for plugin, _ in config.pluginmanager.list_plugin_distinfo()]
            modules = {getattr(plugin, "__name__", type(plugin).__module__) for plugin in plugins}
            self._names = frozenset(module.partition(".")[0] for module in modules) - _OWN_PACKAGES
        self._show()

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """Show plugins' warnings while tests are collected."""
        self._show()
        return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self) -> Generator[None]:
        """Show plugins' warnings while the session finishes."""
        self._show()
        return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_terminal_summary(self) -> Generator[None]:
        """Show plugins' warnings while the summary is printed."""
        self._show()
        return (yield)

    def _show(self) -> None:
        """Add warning filters that show the warnings of plugins."""
        for name in sorted(self._names):
            warnings.filterwarnings("default", module=rf"{re.escape(name)}(\.|$)")

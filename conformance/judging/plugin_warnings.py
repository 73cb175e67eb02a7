"""Keep warnings of other pytest plugins from ending the gate, where a project turns warnings into errors.

A plugin that warns in one of its hooks, as pytest-benchmark does with pytest-xdist, would end pytest in an internal
error. Such warnings are shown. Warnings of kernels and of tests stay what the project makes of them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Generator

import pytest

from conformance.judging import exit_guard

_OWN_PACKAGES = frozenset({"_pytest", "pytest", "conformance"})


class PluginWarnings:
    """Show warnings raised in modules of installed plugins, in all hooks except those that run tests.

    These hooks are innermost, since pytest's own wrappers apply the filters of the project.
    """

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Show warnings while plugins are configured, if this run is to judge."""
        option = config.getoption
        if exit_guard.is_requested(config.args, option("--impl"), option("--conformance-cases")):
            plugins = [plugin for plugin, _ in config.pluginmanager.list_plugin_distinfo()]
            modules = {getattr(plugin, "__name__", type(plugin).__module__) for plugin in plugins}
            self._names = frozenset(module.partition(".")[0] for module in modules) - _OWN_PACKAGES
        self._show()

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """Show warnings while tests are collected."""
        self._show()
        return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self) -> Generator[None]:
        """Show warnings as the run ends."""
        self._show()
        return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_terminal_summary(self) -> Generator[None]:
        """Show warnings in the summary."""
        self._show()
        return (yield)

    def _show(self) -> None:
        """Add filters that show the warnings of plugins."""
        for name in sorted(self._names):
            warnings.filterwarnings("default", module=rf"{re.escape(name)}(\.|$)")

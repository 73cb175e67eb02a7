"""Loads what every worker needs, JAX above all, into the process that they are forked from.

That process computes nothing and starts no threads, so that forking it is safe.
"""

from __future__ import annotations

import importlib

from conformance import environment, packages

packages.claim()
environment.prepare()
importlib.import_module("conformance.judging.parallel")

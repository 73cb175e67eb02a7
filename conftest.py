"""Settings of this repository's own test run, made before anything imports JAX."""

from conformance import environment

environment.prepare()

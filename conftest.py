"""Settings of this repository's own test run, made before anything imports JAX."""

from hypothesis import settings

from conformance import environment

environment.prepare()

# The same examples in every run, so that a red test is red again; `--hypothesis-profile=default` draws new ones.
settings.register_profile("gate", derandomize=True, deadline=None)
settings.load_profile("gate")

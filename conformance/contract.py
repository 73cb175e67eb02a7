"""The contract under its public name, for implementations of users: what `impls.contract.implementation` defines."""

from __future__ import annotations

from conformance import packages

packages.claim_names()  # a user's module called `impls` would be loaded without it

from impls.contract.implementation import *  # noqa: E402, F403 -- after the claim; all that it lists
from impls.contract.implementation import __all__ as __all__  # noqa: E402

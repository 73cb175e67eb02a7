"""The contract under its public name: what `impls.contract.implementation` defines, for implementations of users."""

from __future__ import annotations

from conformance import packages

packages.claim_names()

from impls.contract.implementation import *  # noqa: E402, F403 -- a user's `impls` would be loaded without the claim

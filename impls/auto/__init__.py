"""Automatic choice of a kernel by platform, phase and lengths. Every argument reaches the chosen kernel."""

from impls.auto.attention import attention
from impls.auto.implementation import IMPLEMENTATIONS
from impls.auto.kernel_routes import CANDIDATES, Candidate, Route, find_route
from impls.requested_features import Phase

__all__ = ["CANDIDATES", "IMPLEMENTATIONS", "Candidate", "Phase", "Route", "attention", "find_route"]

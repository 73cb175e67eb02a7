"""Planted bugs of dense attention, by family."""

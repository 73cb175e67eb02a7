"""Planted bugs beyond the grid that there was when they were written."""

"""Rank block sizes by estimates that need no chip."""

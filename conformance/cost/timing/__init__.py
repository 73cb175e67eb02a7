"""Timing implementations side by side, and choosing block sizes by it: what it costs, never whether it is right."""

"""Time implementations side by side, and choose block sizes by timing."""

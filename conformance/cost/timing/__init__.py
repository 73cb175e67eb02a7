"""Time implementations side by side on this machine, and choose block sizes by timing."""

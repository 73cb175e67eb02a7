"""Commands that measure the bank of planted bugs: what the gate catches, how often, and by which signatures."""

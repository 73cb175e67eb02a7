"""The contract: the canonical call, what an implementation declares, and the validation of operands and arguments."""

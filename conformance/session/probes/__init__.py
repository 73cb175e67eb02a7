"""Judge further cases at the end of a red run: to confirm findings, to compare with planted bugs, to shrink."""

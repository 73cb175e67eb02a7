"""Correct attention functions in replaceable steps, in which bugs are planted."""

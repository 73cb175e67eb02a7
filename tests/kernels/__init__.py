"""Attention functions as users write them, right and wrong, for the harness to judge."""

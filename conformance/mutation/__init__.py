"""Measure which wrong attention functions a test suite catches."""

"""Attention as it is served: the same problems, with queries packed behind each other and keys and values in pages."""

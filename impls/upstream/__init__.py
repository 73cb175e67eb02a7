"""Adapters around attention that published libraries ship, one module each; none of them repairs what it wraps."""

"""Adapters around attention of published libraries, one module each. No adapter corrects errors of its library."""

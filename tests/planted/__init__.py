"""The bank of planted bugs: correct kernels in replaceable steps, and bugs planted by replacing one of them."""

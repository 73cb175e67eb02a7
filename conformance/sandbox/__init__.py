"""Run a kernel in a confined process of its own, and exchange nothing but data with it.

The judge never imports the kernel, and the kernel's process never gets the expected results. README.md in this folder
is the introduction.
"""

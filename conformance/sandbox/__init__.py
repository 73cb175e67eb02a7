"""A kernel in a process of its own: what it declares, what is asked of it, and what it answers, travel as data.

The judge never imports the kernel, and the kernel's process never has what is expected. What that process can reach of
the judge is a pipe of bytes.
"""

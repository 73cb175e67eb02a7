"""Tasks that `Executor.run` runs in the kernel's process: they call, transform and trace it, and return data.

A task is a function of an executor. It does not decide what is right; the check that requested it does. Arguments and
results cross process boundaries, so they are problems, arrays, numbers and text. README.md in this folder lists the
modules.
"""

"""Tasks: functions that `Executor.run` runs in the kernel's process, to call, transform or trace the kernel.

The first parameter of a task is the executor. A task returns data and decides no verdict; the check that requested it
judges the data. Arguments and results cross process boundaries, so they are problems, arrays, numbers and text.
README.md in this folder lists the modules.
"""

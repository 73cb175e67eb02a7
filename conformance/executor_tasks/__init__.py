"""What a kernel's process is asked to do: functions of an executor that call, transform and trace, and return data.

Checks name them to `Executor.run`. They say nothing of what is right: that is decided where the answers arrive. What
they are given, and what they return, travels between processes: problems, arrays, numbers and words.
"""

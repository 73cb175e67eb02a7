"""Tables and charts of what compiled kernels cost, from records of the check `compiles`.

They need no chip: the check counts cycles in the compilers' output. There are a table of TPU kernels' schedules, charts
of the estimated cycles of whole TPU calls, and a table of lower bounds on the cycles of GPU kernels.
"""

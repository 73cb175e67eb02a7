"""Find implementations by name, adapt their calls to the canonical call, compile the calls and run them.

`implementation_registry` finds an implementation. `plain_functions`, `stored_calls` and `workload_adapters` adapt other
signatures. `executor` compiles and runs. `kernel_errors` describes exceptions of user code.
"""

"""Judge kernels from Python: `conformance.check`, `conformance.assert_conforms` and `conformance.case`.

The third face of `conformance.session`, beside the command line and the pytest gate.
"""

"""Storage forms: how the operands of a problem lie in memory, and the cases that kernels of each form are judged on.

A form is two modules. `NAME_form` has its `StorageForm` (`storage_form`): how a case id writes it, the operands and
tables of a plain function, the layout of a case, and how dense operands become stored ones. `NAME_cases` has its
`FormCases` (`form_cases`): models for the covering arrays, drawn cases, traces of a server, cases for accelerators. A
line of `form_registry` lists it. Nothing else names a single form, but for calls that write pages (`page_writes`).
"""

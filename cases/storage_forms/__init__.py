"""Storage forms: ways in which operands lie in memory, and the cases that kernels of each form are judged on.

Each form has two modules and a line in `form_registry`:

- `NAME_form` has a `StorageForm` (`storage_form`): how a case id writes the form, which operands and tables a kernel
  gets, how to draw the layout of a case, and how dense operands become stored ones.
- `NAME_cases` has a `FormCases` (`form_cases`): models for covering arrays, strategies of random cases, server traces,
  and cases to compile or interpret for accelerators.

No other module depends on a single form, except `page_writes`, for calls that write pages.
"""

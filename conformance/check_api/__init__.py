"""The interface that checks are written against.

A check gets a `Subject` (an implementation on a case) and yields `Judgement`s. Its `Scope` selects the cases it runs
on, and a `Subchecks` names the costly subchecks that run on a case.
"""

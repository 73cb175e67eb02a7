"""The optional operands of an attention call, one module each; `cases.operand_registry` collects them.

Each module defines one `OPERAND` (`cases.operand.OptionalOperand`): how to draw its values, how to validate them, what
value has no effect (`null`), and what it does to the logits.
"""

"""The optional operands, one module each; `cases.operand_registry` lists them."""

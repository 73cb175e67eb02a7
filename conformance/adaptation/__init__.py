"""Find out what an attention function computes, by small calls, and write an adapter for it.

`target` loads the function and reads its signature, `encodings` lists how libraries pass each operand, `recipe` writes
an adapter as Python code, `probing` calls adapters and compares them with the oracle, and `questions` asks one question
after another. `adapting` is the public call.
"""

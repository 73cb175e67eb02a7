"""Find what causes the red records of a run, and put each cause into words.

Red records are judgements with the verdict `fail`, `error` or `unexpected pass`. `root_causes` groups them into
findings. A finding is one cause, with the features that a case needs to fail by it. `finding_text` phrases findings for
reports.
"""

"""What checks are asked with: the subject that they look at, scopes and turns that say what it is asked, judgements."""

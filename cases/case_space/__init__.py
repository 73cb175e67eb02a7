"""The space of cases that `explore` draws from: what is in it, how to draw from it, what is new in a case."""

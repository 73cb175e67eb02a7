"""The space of random cases for the command `explore`: its alternatives, Hypothesis strategies, and case novelty."""

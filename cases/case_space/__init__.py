"""What `explore` draws: the space of cases, how to draw from it, and what is new or near a clue."""

"""Judge cases that a run did not plan, to confirm or to shrink its failures."""

"""From a name to results: implementations are found, their masks lowered, and their calls compiled and run."""

"""Reference code in JAX to start from: attention with two backward passes, and the front end of a model."""

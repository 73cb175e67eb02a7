"""Start processes quickly, by forking them from a server process that has loaded JAX and never computes anything."""

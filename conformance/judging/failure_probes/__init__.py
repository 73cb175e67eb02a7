"""Judge cases that a run did not plan (probes), to confirm what its failures depend on, or to shrink failing cases."""

"""The commands `bench`, `tune` and `cycles`."""

"""The float64 oracle, the rounding-error bounds around it, and the comparison of results with both."""

"""Truth: the float64 oracle, how far from it a correct kernel may be, and how results are compared with both."""

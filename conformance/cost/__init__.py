"""Measure and estimate what attention costs: time, memory and cycles. Never whether it is right."""

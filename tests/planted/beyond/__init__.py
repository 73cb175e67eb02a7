"""Bugs of classes that lie beyond the grid they were written against."""

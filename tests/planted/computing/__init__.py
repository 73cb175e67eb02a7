"""Bugs in how attention is computed: softmax, blocks, sums, backward passes, programs."""

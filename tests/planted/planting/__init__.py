"""What bugs are planted in: correct kernels taken apart into steps, and the triggers of cases."""

"""What is measured of the bank of planted bugs: what the gate catches, twice, and signatures."""

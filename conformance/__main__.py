"""`python -m conformance`."""

from conformance.cli import run_main

if __name__ == "__main__":
    run_main()

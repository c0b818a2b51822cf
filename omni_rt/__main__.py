"""`python -m omni_rt` is `omni-rt`."""

from omni_rt.cli import main

if __name__ == "__main__":
    main()

"""`python -m dsv4_fleet`."""

from dsv4_fleet.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

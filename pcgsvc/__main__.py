"""`python -m pcgsvc`."""

from pcgsvc.jobs.app import entry

if __name__ == "__main__":
    entry()

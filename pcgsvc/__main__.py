"""`python -m pcgsvc`."""

from pcgsvc.app import entry

if __name__ == "__main__":
    entry()

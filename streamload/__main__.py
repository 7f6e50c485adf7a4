"""`python -m streamload`: the `streamload` command."""

from streamload.cli import main

if __name__ == "__main__":
    main()

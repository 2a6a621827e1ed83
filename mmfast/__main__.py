"""`python -m mmfast` is `mmfast`."""

from mmfast.cli import main

if __name__ == "__main__":
    main()

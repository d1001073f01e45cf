"""``python -m koffline`` is the same as ``koffline``."""

from koffline.cli import main

if __name__ == "__main__":
    main()

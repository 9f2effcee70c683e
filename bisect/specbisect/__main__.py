"""``python -m specbisect``: the same as the command ``specbisect``."""

from specbisect.cli import main

if __name__ == "__main__":
    main()

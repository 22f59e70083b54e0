"""``python -m attacks``: run all attacks."""

from attacks import main

if __name__ == "__main__":  # not in the processes that it starts
    main()

"""`python -m minitrain` is the command `minitrain`."""

from minitrain.cli.main import main

if __name__ == "__main__":
    main()

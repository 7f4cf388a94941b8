"""`python -m kourkoutas` is the `kbeta` command."""

from kourkoutas.cli import main

if __name__ == "__main__":
    main()

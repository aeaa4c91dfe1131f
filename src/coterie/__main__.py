"""`python -m coterie` is the command `coterie`."""

from coterie.cli import app

if __name__ == "__main__":
    app(prog_name="coterie")

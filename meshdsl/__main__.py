"""``python -m meshdsl``."""

from meshdsl.cli import main

main()

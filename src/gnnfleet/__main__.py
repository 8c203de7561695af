"""``python -m gnnfleet`` and ``torchrun -m gnnfleet``."""

from gnnfleet.cli.main import main

main()

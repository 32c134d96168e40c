"""What runs beside the playbooks: the tool-call stress test, the judge, and what rolls a change out in waves."""

__version__ = "0.1.0"

"""A local fleet of containers: the machines that demo and tests operate.

Run it as ``python -m tests.local``; ``--help`` lists the commands.
"""

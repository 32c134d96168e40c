"""The agent: all that one host must do, standard library only (docs/agent.md)."""

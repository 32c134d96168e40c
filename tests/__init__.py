"""The project's tests, and the local fleet they run on."""

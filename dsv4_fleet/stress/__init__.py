"""Many tool-call conversations against a router or workers, and what became of each."""

"""What a run would take on a described machine, computed from its events (no torch here)."""

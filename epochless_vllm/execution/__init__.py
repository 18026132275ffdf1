"""Linear layers over rows of different revisions."""
